"""What autograd saves for backward, offered to the scopes that are open around it.

A scope takes a tensor in its own way (makes it again later, moves it to the host) or leaves it to
the scope around; what nobody takes autograd keeps as it is. torch's own hooks know the innermost
scope alone, so that scopes could not lie within each other.

Parameters are never offered: they live anyway, and whoever shards weights fills the same object
again before its backward.
"""

import threading
from collections.abc import Callable, Iterator
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
    return x.detach()


def _unpack(packed: Tensor | Handle) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed()


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
