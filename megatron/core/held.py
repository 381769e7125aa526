"""Bytes that are there for the sake of communication alone, as long as somebody counts them.

These are whole gradients and weights of which a rank keeps a share, sums under way, and what is
gathered of activations. Whoever makes such a tensor says so: `see` counts it until its memory is
given back, `change` counts memory that comes and goes under a tensor that stays.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor


class Held:
    """Bytes now, and the most there were."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def change(self, size: int) -> None:
        """Take note of ``size`` bytes more, or less where it is negative."""
        self.now += size
        self.most = max(self.most, self.now)


# Of the process, not of a thread: on CUDA autograd gathers and sums in threads of its own.
_counting: list[Held] = []


@contextmanager
def counting() -> Iterator[Held]:
    """Count while the block runs; nothing may be held when it begins."""
    held = Held()
    _counting.append(held)
    try:
        yield held
    finally:
        _counting.remove(held)


def see(tensor: Tensor) -> None:
    """Count the memory of a new tensor until it is given back."""
    for held in _counting:
        storage = tensor.untyped_storage()
        held.change(storage.nbytes())
        weakref.finalize(storage, held.change, -storage.nbytes())


def change(size: int) -> None:
    """Count ``size`` bytes more, or less where it is negative."""
    for held in _counting:
        held.change(size)
