"""Gradients, and weights, that exist as a whole only while a unit of the model needs them.

Each unit has buffers of its own. Its weights are gathered before its forward and given up after it,
the same for its backward; meanwhile those of the unit that came next the last time are on their
way:

    forward     | gather 1 | unit 1, gather 2 | unit 2, gather 3 | ...
    backward    | gather n | unit n, gather n-1 | reduce n, unit n-1, gather n-2 | ...

Memory for a unit's gradients is there from the begin of its backward until their sum over replicas
is added to this rank's share: two units', and those of a tied embedding from its first use to its
last. So every microbatch is reduced on its own, which
costs as many times the traffic of one reduction per iteration as there are microbatches.

A buffer's weights are held by counting: a forward may come inside a backward, where a unit is
computed again. When the gradients of a backward are complete, autograd's hook tells (see
`data_parallel`); sums are started in one order, equal on all ranks. Where a schedule splits the
backward, weights are given up after its first part and gradients are summed after its second, so
that those of all units are there in between.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core import comm
from megatron.core.distributed import reduction
from megatron.core.distributed.buffers import FlatBuffer
from megatron.core.distributed.gathering import gather
from megatron.core.distributed.layout import IN_FLIGHT
from megatron.core.distributed.reduction import Finish
from megatron.core.distributed.units import Order, Unit, Watch, watch


class WholeWeights:
    """Gathers buffers whose weights are shared out, for as long as somebody holds them."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._arriving: dict[int, tuple[FlatBuffer, comm.Handle]] = {}

    def fetch(self, buffer: FlatBuffer) -> None:
        """Start to gather what nobody holds yet."""
        here = id(buffer) in self._holders or id(buffer) in self._arriving
        if buffer.shares.weights and not here:
            buffer.take_data()
            self._arriving[id(buffer)] = (buffer, gather(buffer, 0))

    def hold(self, buffers: Iterable[FlatBuffer]) -> None:
        """Have all weights of ``buffers`` until `release`."""
        held = [buffer for buffer in buffers if buffer.shares.weights]
        for buffer in held:
            self.fetch(buffer)
        for buffer in held:
            self._holders[id(buffer)] = self._holders.get(id(buffer), 0) + 1
            if id(buffer) in self._arriving:
                self._arriving.pop(id(buffer))[1].wait()

    def release(self, buffers: Iterable[FlatBuffer]) -> None:
        """Give weights up that nobody else holds."""
        for buffer in buffers:
            if buffer.shares.weights:
                self._holders[id(buffer)] -= 1
                if not self._holders[id(buffer)]:
                    del self._holders[id(buffer)]
                    buffer.drop_data()

    def settle(self) -> None:
        """Give up what was fetched and is not held."""
        for buffer, handle in self._arriving.values():
            handle.wait()
            buffer.drop_data()
        self._arriving.clear()


class FullySharded:
    """The buffers of all chunks, whose gradients or weights are shared out.

    Args:
        chunks: of the model.
        buffers: that each chunk uses, in the order in which a backward completes them; one may be
            in several.
        units: of the model.
        reduce_dtype: in which gradients travel.
        overlap: let a sum run beside the backward that goes on.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        buffers: Sequence[Sequence[FlatBuffer]],
        units: Sequence[Unit],
        reduce_dtype: torch.dtype,
        *,
        overlap: bool,
    ) -> None:
        self._chunks, self._reduce_dtype = buffers, reduce_dtype
        self._in_flight = IN_FLIGHT if overlap else 0
        self.weights = WholeWeights()
        everything = {id(buffer): buffer for mine in buffers for buffer in mine}
        self._home = {id(p): buffer for buffer in everything.values() for p in buffer.parameters}
        self._needs = [
            list({id(b): b for b in (self._home[id(p)] for p in unit.parameters)}.values())
            for unit in units
        ]
        self._incomplete: dict[int, set[int]] = {}
        """Of each buffer in a backward that goes on: ids of parameters without their gradient."""
        self._queue: list[FlatBuffer] = []
        """To be summed in the backward that goes on, in order."""
        self._pending: list[Finish] = []
        self._forwards = [Order() for _ in chunks]
        self._backwards = [Order() for _ in chunks]
        self._forward = self._backward = Order()
        """Of the chunk that computes."""
        for number, chunk in enumerate(chunks):
            chunk.register_forward_pre_hook(self._enters(number))
        watch(units, Watch(self._before_forward, self._after_forward, self._before_backward))
        for buffer in everything.values():
            for parameter in buffer.parameters:
                parameter.register_post_accumulate_grad_hook(self._complete)

    # Called by chunks and units.

    def _enters(self, chunk: int) -> Callable[[nn.Module, Any], None]:
        def enter(module: nn.Module, inputs: Any) -> None:
            self._forward = self._forwards[chunk]
            self._forward.start()

        return enter

    def _before_forward(self, unit: int) -> None:
        self.weights.hold(self._needs[unit])
        if not self._incomplete:  # a forward inside a backward is none of the model's
            self._fetch(self._forward.after(unit))

    def _after_forward(self, unit: int) -> None:
        self.weights.release(self._needs[unit])

    def _before_backward(self, unit: int) -> None:
        for buffer in self._needs[unit]:
            if id(buffer) not in self._incomplete:
                self._incomplete[id(buffer)] = set(map(id, buffer.parameters))
                self.weights.hold([buffer])
                buffer.take_grad()
        self._fetch(self._backward.after(unit))

    def _fetch(self, unit: int | None) -> None:
        for buffer in self._needs[unit] if unit is not None else ():
            if id(buffer) not in self._incomplete:  # else it is here, or needed no more
                self.weights.fetch(buffer)

    def _complete(self, parameter: Tensor) -> None:
        buffer = self._home[id(parameter)]
        missing = self._incomplete.get(id(buffer))
        if missing is None:
            return
        missing.discard(id(parameter))
        if not missing:
            self.weights.release([buffer])
        while self._queue and self._incomplete.get(id(self._queue[0]), True) == set():
            self._sum(self._queue.pop(0))

    # Called around the actions of a schedule.

    def begin(self, chunk: int, kind: str) -> None:
        """Expect gradients of a chunk: of a whole ``backward``, or of one of its two parts."""
        self._backward = self._backwards[chunk]
        self._backward.start()
        if kind == "backward":
            self._queue = list(self._chunks[chunk])
        elif kind == "backward_weight":  # what was postponed is added without any hook
            for buffer in self._chunks[chunk]:
                buffer.take_grad()

    def finish(self, chunk: int, kind: str) -> None:
        """Sum what is complete, and give up all weights."""
        for buffer in self._chunks[chunk]:
            # A parameter that took no part has had no hook.
            if self._incomplete.pop(id(buffer), None):
                self.weights.release([buffer])
        self.weights.settle()
        assert not self._incomplete, "a unit of another chunk took part in a backward"
        if kind == "backward_weight":
            self._queue = list(self._chunks[chunk])
        while self._queue:
            buffer = self._queue.pop(0)
            buffer.take_grad()
            self._sum(buffer)
        self._drain(0)

    def _sum(self, buffer: FlatBuffer) -> None:
        if (
            not buffer.shares.gradients
        ):  # they add up in place, and are summed once (`DataParallel`)
            return
        self._pending.append(reduction.start(buffer, 0, self._reduce_dtype))
        self._drain(self._in_flight)

    def _drain(self, left: int) -> None:
        while len(self._pending) > left:
            self._pending.pop(0)()
