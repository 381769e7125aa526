"""Activation offload: what a part of a model saves waits for its backward in host memory.

    offloader = Offloader(device, least=2**20)
    with offloader.forward(tables):               one forward pass
        with offloader.group(weights): ...        what is saved here goes to the host

Memory moves as a whole: a view takes all of what it is a view of, once for all its views, and finds
it again at the same place with the same strides, so that results are the same bit for bit. What
lives anyway is left alone: weights, anything in their memory, and tensors smaller than ``least``.

Backward asks for a group's tensors last group first. The first one that it needs brings the group
back, and the group before it as well: that is under way while backward works.

On CUDA host buffers are pinned and used again, and copies run in two streams of their own, one for
each direction. Elsewhere they are plain copies, made at once.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.core import saved_tensors
from megatron.core.saved_tensors import Handle, View, keeping, memory_of


class Offloader:
    """Groups of saved tensors, in the order of one forward pass after the other.

    Args:
        device: where activations live.
        least: elements of memory below which it stays there.
    """

    def __init__(self, device: torch.device, least: int = 0) -> None:
        self._device, self._least = device, least
        self._copies: Copies = CudaCopies(device) if device.type == "cuda" else HostCopies(device)
        self._last: Group | None = None

        self._shared: frozenset[int] = frozenset()

    @contextmanager
    def forward(self, shared: Iterable[Tensor] = ()) -> Iterator[None]:
        """Let groups of the block follow one another: backward goes through them the other way.

        Args:
            shared: tensors that all groups read and none is to move, such as rotary tables.
        """
        self._last, self._shared = None, frozenset(map(memory_of, shared))
        try:
            yield
        finally:
            self._last, self._shared = None, frozenset()

    @contextmanager
    def group(self, resident: Callable[[], Iterable[Tensor]]) -> Iterator[None]:
        """Move what is saved in the block, in one group.

        Args:
            resident: gives tensors that live anyway. It is called when something is to be moved
                first: where weights are gathered for a layer, they are there then.
        """
        group = Group(self._device, self._least, self._copies, self._last)
        self._last = group
        with group.taking(resident, self._shared):
            yield


class Group:
    """What one part of a model has saved in one forward pass."""

    def __init__(
        self, device: torch.device, least: int, copies: "Copies", before: "Group | None"
    ) -> None:
        self._device, self._least, self._copies, self._before = device, least, copies, before
        self._away: list[weakref.ref[_Away]] = []
        self._is_back = False

    @contextmanager
    def taking(
        self, resident: Callable[[], Iterable[Tensor]], shared: frozenset[int]
    ) -> Iterator[None]:
        """Take what is saved in the block."""
        with keeping(_Taking(self, resident, shared)):
            yield

    def send(self, x: Tensor) -> "_Away":
        """Send the memory of a tensor to the host."""
        away = _Away(x, self, self._copies)
        self._away.append(weakref.ref(away))
        return away

    def is_small(self, x: Tensor) -> bool:
        """Return whether the memory of a tensor is not worth it, or is not the device's."""
        size = x.untyped_storage().nbytes()
        return x.device != self._device or size < max(self._least * x.element_size(), 1)

    def bring_back(self) -> None:
        """Start to bring back what is still needed, here and in the group before."""
        for group in (self, self._before):
            if group is not None and not group._is_back:
                group._is_back = True
                for reference in group._away:
                    away = reference()
                    if away is not None:
                        away.start()
        self._before = None


class _Taking:
    """A group while its part of the model runs."""

    def __init__(
        self, group: Group, resident: Callable[[], Iterable[Tensor]], shared: frozenset[int]
    ) -> None:
        self._group, self._resident, self._shared = group, resident, shared
        self._known: frozenset[int] | None = None
        # What was sent is held until the part has run, so that no other memory is at its place.
        self._sent: dict[int, tuple[Tensor, _Away]] = {}

    def keep(self, x: Tensor) -> Handle | None:
        at = memory_of(x)
        if at not in self._sent:
            if self._group.is_small(x) or at in self._that_stay():
                return None
            self._sent[at] = (x.detach(), self._group.send(x))
        away, view = self._sent[at][1], View(x)
        return lambda: view.into(away.fetched())

    def _that_stay(self) -> frozenset[int]:
        if self._known is None:
            self._known = self._shared.union(map(memory_of, self._resident()))
        return self._known


class Arriving(Protocol):
    """Memory that is on its way to the device."""

    def storage(self) -> torch.UntypedStorage:
        """Return it, for work of the current stream."""
        ...


class Copies(Protocol):
    """How memory gets to the host and back."""

    def send(self, x: Tensor) -> Any:
        """Return a ticket for a copy of all bytes in ``x``, uint8; ``x`` may go at once."""
        ...

    def start(self, ticket: Any) -> Arriving:
        """Start to copy back."""
        ...

    def free(self, ticket: Any) -> None:
        """Give the host buffer of a ticket back."""
        ...


class _Away:
    """One piece of memory in the host, until its last handle is gone."""

    def __init__(self, x: Tensor, group: Group, copies: Copies) -> None:
        self._group, self._copies = group, copies
        storage = x.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage)
        self._ticket = copies.send(whole)
        self._arriving: Arriving | None = None
        weakref.finalize(self, copies.free, self._ticket).atexit = False

    def start(self) -> None:
        """Start to bring it back, if nobody has."""
        if self._arriving is None:
            self._arriving = self._copies.start(self._ticket)

    def fetched(self) -> torch.UntypedStorage:
        """Return it on the device, where it stays until its last handle is gone."""
        self._group.bring_back()
        self.start()
        assert self._arriving is not None
        return self._arriving.storage()


class Pool:
    """Host buffers by size, used again."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._free: dict[int, list[Any]] = {}
        self.bytes = 0
        """Of all buffers, in use or not."""

    def take(self, size: int) -> tuple[Tensor, Any]:
        """Return a buffer of ``size`` bytes, and what its last user left with it."""
        free = self._free.get(size)
        if free:
            return free.pop()  # type: ignore[no-any-return]
        self.bytes += size
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned), None

    def put(self, buffer: Tensor, note: Any) -> None:
        """Take a buffer back."""
        self._free.setdefault(buffer.numel(), []).append((buffer, note))


class _There:
    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage

    def storage(self) -> torch.UntypedStorage:
        return self._storage


class HostCopies:
    """Copies on a device whose work is done when a call returns: the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.pool = device, Pool(pinned=False)

    def send(self, x: Tensor) -> Tensor:
        buffer, _ = self.pool.take(x.numel())
        return buffer.copy_(x)

    def start(self, ticket: Tensor) -> Arriving:
        x = ticket.to(self._device, copy=True)
        saved_tensors.see(x)
        return _There(x.untyped_storage())

    def free(self, ticket: Tensor) -> None:
        self.pool.put(ticket, None)


class _CudaTicket:
    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.done = torch.cuda.Event()
        """After the last copy out of or into the buffer."""


class _Landing:
    def __init__(self, x: Tensor, done: torch.cuda.Event) -> None:
        self._x, self._done = x, done

    def storage(self) -> torch.UntypedStorage:
        torch.cuda.current_stream(self._x.device).wait_event(self._done)
        return self._x.untyped_storage()


class CudaCopies:
    """Copies beside the device's work, from and to pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.pool = device, Pool(pinned=True)
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def send(self, x: Tensor) -> _CudaTicket:
        buffer, used = self.pool.take(x.numel())
        ticket = _CudaTicket(buffer)
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        if used is not None:
            self._out.wait_event(used)
        with torch.cuda.stream(self._out):
            buffer.copy_(x, non_blocking=True)
            ticket.done.record(self._out)
        x.record_stream(self._out)  # its memory is not given to others before the copy has ended
        return ticket

    def start(self, ticket: _CudaTicket) -> Arriving:
        current = torch.cuda.current_stream(self._device)
        x = torch.empty(ticket.buffer.numel(), dtype=torch.uint8, device=self._device)
        saved_tensors.see(x)
        # After what was in this memory before, and after the way out.
        self._back.wait_stream(current)
        self._back.wait_event(ticket.done)
        with torch.cuda.stream(self._back):
            x.copy_(ticket.buffer, non_blocking=True)
            ticket.done = torch.cuda.Event()
            ticket.done.record(self._back)
        x.record_stream(self._back)
        return _Landing(x, ticket.done)

    def free(self, ticket: _CudaTicket) -> None:
        self.pool.put(ticket.buffer, ticket.done)
