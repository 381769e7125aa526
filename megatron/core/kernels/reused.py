"""Memory of the host that large results take in turns.

The C library asks the system for the memory of a large tensor each time, and the system clears each
page of it at the first touch, which for logits takes a good part of the time of their product.
`Reused` keeps what one result leaves for the next one of its owner.
"""

import math
import mmap
import os
import weakref
from contextlib import suppress

import torch
from torch import Tensor

SMALLEST = 2**25
"""Bytes from which on results take turns; smaller ones come from the process's heap."""
PAGE = 2**21
ANONYMOUS = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
"""0 on systems without either: there nothing is kept."""


class Reused:
    """Results of one place in a model, of which a later one lies where an earlier one lay.

    An earlier one that somebody still has, as a view or for a backward, keeps its place. So as many
    places are held as results were ever there at once. A place of less than the size asked for, or
    of more than twice, is given up. A copy of the owner starts with none.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def __reduce__(self) -> tuple[type["Reused"], tuple[()]]:
        return Reused, ()

    def take(self, *shape: int, dtype: torch.dtype) -> Tensor | None:
        """Return a tensor of the CPU with whatever numbers there are; None if it would be small.

        Its storage cannot be resized.
        """
        count = math.prod(shape)
        size = count * dtype.itemsize
        if size < max(SMALLEST, 1) or not ANONYMOUS:
            return None
        block = self._block(size)
        view = memoryview(block)
        returns = weakref.finalize(view, _give_back, weakref.ref(self), block)
        returns.atexit = False
        # Not `view`: what an autograd function returns must be nobody's view to be overwritten.
        return torch.frombuffer(view, dtype=dtype, count=count).resize_(shape)

    def _block(self, size: int) -> mmap.mmap:
        with suppress(IndexError):  # there is none; to ask first would be a race of threads
            while True:
                block = self._free.pop()
                if size <= len(block) <= 2 * max(size, PAGE):
                    return block
        block = mmap.mmap(-1, -(-size // PAGE) * PAGE, flags=ANONYMOUS)
        if os.environ.get("THP_MEM_ALLOC_ENABLE") == "1" and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without them; torch goes on too
                block.madvise(mmap.MADV_HUGEPAGE)
        return block


def _give_back(owner: "weakref.ref[Reused]", block: mmap.mmap) -> None:
    memory = owner()
    if memory is not None:
        memory._free.append(block)
