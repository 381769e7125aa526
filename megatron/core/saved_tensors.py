"""What autograd saves for backward, offered to the scopes that are open around it.

A scope takes a tensor in its own way (makes it again later, moves it to the host) or leaves it to
the scope around; what nobody takes autograd keeps as it is. torch's own hooks know the innermost
scope alone, so that scopes could not lie within each other.

Parameters are never offered: they live anyway, and whoever shards weights fills the same object
again before its backward.

`counting` tells how much memory all this takes. Whoever keeps tensors for a backward beside
autograd, or has some back for it, says so (`see`).
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

Handle = Callable[[], Tensor]
"""Gives back what was saved, when backward asks for it."""


class Scope(Protocol):
    """Something that takes saved tensors."""

    def keep(self, x: Tensor) -> Handle | None:
        """Return what stands for ``x`` until backward, or None to leave it to the scope around.

        ``x`` may carry its history, which must not be kept: it may lead back to what saves it.
        """
        ...


class _Open(threading.local):
    """The scopes of a thread, innermost last: on CUDA backwards run in threads of their own."""

    def __init__(self) -> None:
        self.scopes: list[Scope] = []


_open = _Open()


@contextmanager
def keeping(scope: Scope) -> Iterator[None]:
    """Offer ``scope`` every tensor that is saved in the block, unless one within takes it."""
    _open.scopes.append(scope)
    try:
        with saved_tensors_hooks(_pack, _unpack):
            yield
    finally:
        innermost = _open.scopes.pop()
        assert innermost is scope


def _pack(x: Tensor) -> Tensor | Handle:
    if isinstance(x, nn.Parameter):
        return x
    for scope in reversed(_open.scopes):
        handle = scope.keep(x)
        if handle is not None:
            return handle
    kept = x.detach()
    see(kept)
    return kept


def _unpack(packed: Tensor | Handle) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed()


class Saved:
    """Bytes of what is saved, each piece of memory once: now, and the most there were.

    Args:
        known: tensors that live anyway and do not count, whatever is saved of their memory.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        self.now = self.most = 0
        # By identity: the memory of what is shared out comes and goes.
        self._known: set[int] = set()
        self.ignore(known)
        self._pieces: dict[int, int] = {}

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Do not count the memory of more tensors."""
        self._known.update(map(memory_of, tensors))

    def see(self, x: Tensor) -> None:
        """Count the memory of ``x``, until nobody holds it."""
        storage = x.untyped_storage()
        at = storage.data_ptr()
        known = memory_of(x) in self._known or at in self._pieces
        if not known and storage.nbytes():
            self._pieces[at] = storage.nbytes()
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._gone, at).atexit = False

    def _gone(self, at: int) -> None:
        self.now -= self._pieces.pop(at)


# Of the process, not of a thread: on CUDA a region runs again in a thread of autograd's.
_counting: list[Saved] = []


@contextmanager
def counting(known: Iterable[Tensor]) -> Iterator[Saved]:
    """Count what is saved in the block; ``known`` lives anyway."""
    saved = Saved(known)
    _counting.append(saved)
    try:
        with saved_tensors_hooks(_pack, _unpack):
            yield saved
    finally:
        _counting.remove(saved)


def see(x: Tensor) -> None:
    """Count the memory of a tensor that is there for a backward, where somebody counts."""
    for saved in _counting:
        saved.see(x)


def memory_of(x: Tensor) -> int:
    """Return what tells the memory of ``x`` from any other that lives; views share it."""
    return int(x.untyped_storage()._cdata)


class View:
    """Where in its memory a tensor lies: what it takes to see the same in a copy of the memory."""

    def __init__(self, x: Tensor) -> None:
        self.dtype, self.device = x.dtype, x.device
        self.size, self.stride, self.offset = x.size(), x.stride(), x.storage_offset()

    def into(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the tensor that lies at the same place of ``storage``, on the same device."""
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        return empty.set_(storage, self.offset, self.size, self.stride)
