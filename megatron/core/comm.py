"""Collectives over an axis of the mesh; each is a no-op where the axis has size 1.

What ranks tell each other passes here, so that one place can count calls and payload (`counting`),
one can write down every call (`recording`) and one place knows torch's names. Payload is the full
tensor of the call: what an all-gather returns, what a reduce-scatter takes; of objects, their
pickles. Tensors must be contiguous, as NCCL asks.

Not counted is what a mesh says when it is made (`mesh.choose_overlap`, and the first call of NCCL
along a pipeline), what operators of others move by themselves (torch's fused ones through symmetric
memory in `tensor_parallel.overlap`, Transformer Engine's cross entropy), and what watchdogs say
through sockets of their own.
"""

import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core import held
from megatron.core.mesh import Axis

Op = Literal["sum", "max", "min"]
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# Newer versions of torch warn of the older names.
_ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
# Of the process, not of a thread or context: on CUDA autograd runs the collectives of a backward in
# threads of its own, which must be counted too.
_counting: list["Traffic"] = []
_recording: list[list["Call"]] = []
_waiting: list[str] = []


class Traffic:
    """Calls and payload bytes by (axis, collective)."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()

    def add(self, axis: Axis, name: str, size: int) -> None:
        """Count one call."""
        self.calls[axis.name, name] += 1
        self.bytes[axis.name, name] += size


@contextmanager
def counting() -> Iterator[Traffic]:
    """Count what this process communicates while the block runs."""
    traffic = Traffic()
    _counting.append(traffic)
    try:
        yield traffic
    finally:
        _counting.remove(traffic)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Mark that the main thread waits for other ranks while the block runs, and for what.

    On NCCL a call here returns at once, and the host waits where it reads the result. Whoever finds
    out which rank keeps the others waiting needs to know.
    """
    _waiting.append(what)
    try:
        yield
    finally:
        _waiting.pop()


def awaited() -> str | None:
    """Return what `waiting` marks at the moment; may be asked from any thread."""
    marks = _waiting[-1:]
    return marks[0] if marks else None


class Call(NamedTuple):
    """One call as a rank made it; ranks of a group must agree on the order of their calls."""

    axis: str
    ranks: tuple[int, ...]
    """Of the group, global."""
    name: str
    """The collective; of a reduction with its operation, such as ``all_reduce max``."""
    shape: tuple[int, ...]
    dtype: str
    peer: int | None = None
    """The other rank of a send or receive, global."""

    def __str__(self) -> str:
        towards = "to" if self.name == "send" else "from"
        peer = "" if self.peer is None else f" {towards} rank {self.peer}"
        return f"{self.name}{peer} of {self.dtype} {list(self.shape)}"


@contextmanager
def recording() -> Iterator[list[Call]]:
    """Write down this process's calls, in order, while the block runs; for debugging and tests."""
    calls: list[Call] = []
    _recording.append(calls)
    try:
        yield calls
    finally:
        _recording.remove(calls)


class Work(Protocol):
    """What was started; `dist.Work` is such."""

    def wait(self) -> Any: ...


class Handle:
    """Work under way; whoever started it waits on it before touching its tensors."""

    def __init__(self, work: Work | None) -> None:
        self._work = work

    def wait(self) -> None:
        """Return once the result may be read (on CUDA: by the current stream)."""
        if self._work is not None:
            self._work.wait()
            self._work = None


def all_reduce(x: Tensor, axis: Axis, op: Op = "sum", *, async_op: bool = False) -> Handle:
    """Reduce ``x`` over ``axis`` in place."""
    if axis.size == 1:
        return Handle(None)
    _count(axis, "all_reduce", x, detail=op)
    return _started(dist.all_reduce(x, _OPS[op], axis.group, async_op=True), async_op)


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """Return every rank's ``x``, joined along dim 0 in coordinate order."""
    if axis.size == 1:
        return x
    out = x.new_empty(x.shape[0] * axis.size, *x.shape[1:])
    held.see(out)
    all_gather_into(out, x, axis)
    return out


def all_gather_into(out: Tensor, x: Tensor, axis: Axis, *, async_op: bool = False) -> Handle:
    """Fill ``out`` with every rank's ``x``, joined along dim 0."""
    if axis.size == 1:
        if out.data_ptr() != x.data_ptr():
            out.copy_(x.view_as(out))
        return Handle(None)
    _count(axis, "all_gather", out)
    return _started(_ALL_GATHER(out, x.contiguous(), group=axis.group, async_op=True), async_op)


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """Return this rank's slice along dim 0 of the sum of ``x``."""
    if axis.size == 1:
        return x
    out = x.new_empty(x.shape[0] // axis.size, *x.shape[1:])
    reduce_scatter_into(out, x, axis)
    return out


def reduce_scatter_into(out: Tensor, x: Tensor, axis: Axis, *, async_op: bool = False) -> Handle:
    """Fill ``out`` with this rank's slice along dim 0 of the sum of ``x``."""
    if axis.size == 1:
        if out.data_ptr() != x.data_ptr():
            out.copy_(x.view_as(out))
        return Handle(None)
    _count(axis, "reduce_scatter", x)
    return _started(_REDUCE_SCATTER(out, x.contiguous(), group=axis.group, async_op=True), async_op)


def all_to_all(x: Tensor, axis: Axis) -> Tensor:
    """Send slice i of ``x`` along dim 0 to coordinate i; return what came, in coordinate order."""
    if axis.size == 1:
        return x
    assert x.shape[0] % axis.size == 0, f"{x.shape[0]} rows to {axis.size} ranks"
    _count(axis, "all_to_all", x)
    out = x.new_empty(x.shape)
    dist.all_to_all_single(out, x, group=axis.group)
    return out


class Arrival:
    """A tensor on its way here, while another one is on its way from here."""

    def __init__(self, tensor: Tensor, sent: Tensor, works: list[Work]) -> None:
        self.tensor, self._sent, self._works = tensor, sent, works

    def wait(self) -> Tensor:
        """Return what arrived, once it may be read and what was sent may be written."""
        for work in self._works:
            work.wait()
        self._works.clear()
        return self.tensor


def exchange(
    x: Tensor,
    axis: Axis,
    sent: Sequence[int],
    received: Sequence[int],
    *,
    counted: Literal["sent", "received"] = "sent",
) -> Arrival:
    """Send ``sent[i]`` rows of ``x`` to coordinate i; receive all others' rows for this one.

    Args:
        x: rows for coordinate 0, then those for 1, and so on.
        axis: who exchanges.
        sent: rows for each coordinate; may be 0, and differ between ranks.
        received: rows from each, which the others know as theirs to this rank; they come in
            coordinate order.
        counted: which end's bytes are the payload: the one that does not depend on the data.
    """
    if axis.size == 1:
        return Arrival(x, x, [])
    assert sum(sent) == x.shape[0], f"{x.shape[0]} rows, {list(sent)} to be sent"
    out = x.new_empty(sum(received), *x.shape[1:])
    _count(axis, "all_to_all", x if counted == "sent" else out)
    work = dist.all_to_all_single(
        out, x, list(received), list(sent), group=axis.group, async_op=True
    )
    return Arrival(out, x, [work])


def shift(x: Tensor, axis: Axis) -> Arrival:
    """Send ``x`` to the next coordinate and receive the previous one's, as in a ring."""
    if axis.size == 1:
        return Arrival(x, x, [])
    _count(axis, "shift", x)
    out = torch.empty_like(x)
    held.see(out)
    here = axis.coordinate
    # Both in one batch: neither gloo nor NCCL buffers a send.
    works = _transfer(
        axis, (dist.isend, x, (here + 1) % axis.size), (dist.irecv, out, (here - 1) % axis.size)
    )
    return Arrival(out, x, works)


def send(x: Tensor, axis: Axis, target: int) -> Handle:
    """Start to send ``x`` to coordinate ``target``; it must not change until that has ended.

    Nothing is buffered: it ends only after the target has started to receive. What a rank starts
    on an axis may run in the order of starting, so all must agree on one (`pipeline_parallel.order`
    finds it).
    """
    _count(axis, "send", x, axis.ranks[target])
    return Handle(*_transfer(axis, (dist.isend, x, target)))


def receive(out: Tensor, axis: Axis, source: int) -> Handle:
    """Start to fill ``out`` with what coordinate ``source`` sends; see `send`."""
    _count(axis, "receive", out, axis.ranks[source])
    return Handle(*_transfer(axis, (dist.irecv, out, source)))


def _transfer(axis: Axis, *ends: tuple[Any, Tensor, int]) -> list[Work]:
    """Start sends and receives in one batch: `dist.isend` or `irecv`, tensor, coordinate of each.

    A batch even of one: on NCCL a lone isend would make a communicator of its own for each pair.
    """
    by_host = _is_by_host(axis, ends[0][1])
    given = [(_in_host(op, x) if by_host else x, op, axis.ranks[peer]) for op, x, peer in ends]
    started = dist.batch_isend_irecv([dist.P2POp(op, x, p, axis.group) for x, op, p in given])
    if not by_host:
        return list(started)
    return [
        work if op is dist.isend else _Landing(work, host, out)
        for work, (op, out, _), (host, _, _) in zip(started, ends, given, strict=True)
    ]


def _is_by_host(axis: Axis, x: Tensor) -> bool:
    """Return whether transfers go through host memory: gloo's know no other, its sums do."""
    return x.is_cuda and dist.get_backend(axis.group) == "gloo"


def _in_host(op: Any, x: Tensor) -> Tensor:
    """Return what a transfer reads or writes in place of a tensor on a device."""
    return x.to("cpu", copy=True) if op is dist.isend else torch.empty_like(x, device="cpu")


class _Landing:
    """A receive into host memory, which goes on to the device when it is waited for."""

    def __init__(self, work: Work, host: Tensor, out: Tensor) -> None:
        self._work, self._host, self._out = work, host, out

    def wait(self) -> None:
        self._work.wait()
        self._out.copy_(self._host)


def broadcast(x: Tensor, axis: Axis, source: int) -> None:
    """Fill ``x`` on every rank with what coordinate ``source`` has in it."""
    if axis.size > 1:
        _count(axis, "broadcast", x, detail=f"from {axis.ranks[source]}")
        dist.broadcast(x, axis.ranks[source], axis.group)


def gather_objects(value: Any, axis: Axis) -> list[Any]:
    """Return every rank's picklable ``value``, in coordinate order; for small metadata only."""
    if axis.size == 1:
        return [value]
    _record(Call(axis.name, axis.ranks, "gather_objects", (), "object"))
    values: list[Any] = [None] * axis.size
    dist.all_gather_object(values, value, axis.group)
    for traffic in _counting:
        traffic.add(axis, "gather_objects", sum(len(pickle.dumps(each)) for each in values))
    return values


def broadcast_object(value: Any, axis: Axis) -> Any:
    """Return the first coordinate's picklable ``value``; what others give is not looked at."""
    if axis.size == 1:
        return value
    _record(Call(axis.name, axis.ranks, "broadcast_object", (), "object"))
    values = [value if axis.coordinate == 0 else None]
    dist.broadcast_object_list(values, axis.ranks[0], axis.group)
    for traffic in _counting:
        traffic.add(axis, "broadcast_object", len(pickle.dumps(values[0])))
    return values[0]


def barrier(axis: Axis) -> None:
    """Return once every rank of ``axis`` has come here."""
    if axis.size > 1:
        _record(Call(axis.name, axis.ranks, "barrier", (), "nothing"))
        for traffic in _counting:
            traffic.add(axis, "barrier", 0)
        # Else NCCL would guess the device, from the rank.
        by_nccl = dist.get_backend(axis.group) == "nccl"
        dist.barrier(axis.group, device_ids=[torch.cuda.current_device()] if by_nccl else None)


def _count(axis: Axis, name: str, x: Tensor, peer: int | None = None, *, detail: str = "") -> None:
    assert x.is_contiguous(), f"{name} over {axis.name}: tensor is not contiguous"
    for traffic in _counting:
        traffic.add(axis, name, x.numel() * x.element_size())
    if _recording:
        title, dtype = f"{name} {detail}".strip(), str(x.dtype).removeprefix("torch.")
        _record(Call(axis.name, axis.ranks, title, tuple(x.shape), dtype, peer))


def _record(call: Call) -> None:
    for calls in _recording:
        calls.append(call)


def _started(work: dist.Work, async_op: bool) -> Handle:
    handle = Handle(work)
    if not async_op:
        handle.wait()
    return handle
