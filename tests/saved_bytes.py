"""Measures what autograd saves: bytes of memory, each piece once, now and at most.

Also counted are a stage's input and output as far as they stay, what postponed weight gradients
hold on to, and what is back for a backward because it was recomputed or offloaded; not counted is
what lives anyway, such as weights.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron.core import offload, recompute
from megatron.core.pipeline_parallel import executor, messages
from megatron.core.pipeline_parallel.schedules import Action
from megatron.core.saved_tensors import Handle, keeping
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import postponing
from megatron.training import passes


class Meter:
    """Pieces of memory that something is saved in."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        self._known: set[int] = set()
        self.ignore(known)
        self._pieces: dict[int, int] = {}
        self.now = self.most = 0

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Do not count the memory of tensors that live anyway."""
        # By identity: the memory of what is shared out comes and goes.
        self._known |= {x.untyped_storage()._cdata for x in tensors}

    def see(self, x: Tensor) -> Tensor:
        """Count the memory of ``x``, until nobody holds it."""
        storage = x.untyped_storage()
        at = storage.data_ptr()
        known = storage._cdata in self._known or at in self._pieces
        if not known and storage.nbytes():
            self._pieces[at] = storage.nbytes()
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._gone, at)
        return x

    def _gone(self, at: int) -> None:
        self.now -= self._pieces.pop(at)


class _Kept:
    """The outermost scope of what is saved: it keeps tensors as autograd would, and counts them."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def keep(self, x: Tensor) -> Handle:
        kept = self._meter.see(x).detach()
        return lambda: kept


class _Tasks(list[Callable[[], Any]]):
    """Postponed weight gradients, whose tensors are seen as they come."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def append(self, task: Any) -> None:
        super().append(task)
        for x in task.args[1:]:
            if isinstance(x, Tensor):
                self._meter.see(x)


@contextmanager
def metering(known: Iterable[Tensor], monkeypatch: Any) -> Iterator[Meter]:
    """Count what is saved in the block; ``known`` lives anyway."""
    meter = Meter(known)
    _watch_stages(meter, monkeypatch)
    _watch_what_comes_back(meter, monkeypatch)
    with keeping(_Kept(meter)):
        yield meter


def _watch_what_comes_back(meter: Meter, monkeypatch: Any) -> None:
    """See what is made again, and what returns from the host."""
    fill, start = recompute._Slot.fill, offload._Away.start

    def filled(slot: Any, again: Any) -> None:
        fill(slot, again)
        meter.see(slot._value)

    def started(away: Any) -> None:
        start(away)
        meter.see(torch.empty(0, dtype=torch.uint8).set_(away._arriving.storage()))

    monkeypatch.setattr(recompute._Slot, "fill", filled)
    monkeypatch.setattr(offload._Away, "start", started)


def _watch_stages(meter: Meter, monkeypatch: Any) -> None:
    sent, made = executor._Iteration._free, executor._Iteration._forward

    def free(iteration: Any, microbatch: int, chunk: int) -> None:
        sent(iteration, microbatch, chunk)
        for x in iteration.kept.get((microbatch, chunk), ()):
            if x is not None:
                meter.see(x)

    def forward(iteration: Any, action: Action) -> None:
        made(iteration, action)
        x = iteration.kept[action.microbatch, action.chunk][0]
        if x is not None:
            meter.see(x)  # for its gradient
        message = messages.made(iteration.placement, iteration.rank, action)
        if message and iteration.placement.owner(message.target)[0] == iteration.rank:
            meter.see(iteration.kept[action.microbatch, action.chunk][1])  # it is not sent

    @contextmanager
    def postponed() -> Iterator[list[Callable[[], Any]]]:
        with postponing() as tasks:
            layers._postponed[-1] = seen = _Tasks(meter)
            yield seen
            layers._postponed[-1] = tasks

    monkeypatch.setattr(executor._Iteration, "_free", free)
    monkeypatch.setattr(executor._Iteration, "_forward", forward)
    monkeypatch.setattr(passes, "postponing", postponed)
