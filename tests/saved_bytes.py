"""Measures what autograd saves: bytes of memory, each piece once, now and at most.

Also counted are a stage's input and output as far as they stay, and what postponed weight gradients
hold on to; not counted is what lives anyway, such as weights.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron.core.pipeline_parallel import executor, messages
from megatron.core.pipeline_parallel.schedules import Action
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
        self._known |= {x.untyped_storage().data_ptr() for x in tensors}

    def see(self, x: Tensor) -> Tensor:
        """Count the memory of ``x``, until nobody holds it."""
        storage = x.untyped_storage()
        at = storage.data_ptr()
        if at not in self._known and at not in self._pieces and storage.nbytes():
            self._pieces[at] = storage.nbytes()
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._gone, at)
        return x

    def _gone(self, at: int) -> None:
        self.now -= self._pieces.pop(at)


class _Saved:
    """Holds a saved tensor as autograd would; without its history, which may lead back here."""

    def __init__(self, x: Tensor) -> None:
        self.x = x.detach()


@contextmanager
def metering(known: Iterable[Tensor], monkeypatch: Any) -> Iterator[Meter]:
    """Count what is saved in the block; ``known`` lives anyway."""
    meter = Meter(known)
    _watch_stages(meter, monkeypatch)

    def pack(x: Tensor) -> _Saved:
        meter.see(x)
        return _Saved(x)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.x):
        yield meter


def _watch_stages(meter: Meter, monkeypatch: Any) -> None:
    sent, made = executor._Iteration._free, executor._Iteration._forward

    def free(iteration: Any, microbatch: int, chunk: int) -> None:
        sent(iteration, microbatch, chunk)
        for x in iteration.kept.get((microbatch, chunk), ()):
            if x is not None:
                meter.see(x)

    def forward(iteration: Any, action: Action) -> None:
        made(iteration, action)
        message = messages.made(iteration.placement, iteration.rank, action)
        if message and iteration.placement.owner(message.target)[0] == iteration.rank:
            meter.see(iteration.kept[action.microbatch, action.chunk][1])  # it is not sent

    @contextmanager
    def postponed() -> Iterator[list[Callable[[], Any]]]:
        with postponing() as tasks:
            yield tasks
        for task in tasks:
            for x in task.args[1:]:  # type: ignore[attr-defined]
                if isinstance(x, Tensor):
                    meter.see(x)

    monkeypatch.setattr(executor._Iteration, "_free", free)
    monkeypatch.setattr(executor._Iteration, "_forward", forward)
    monkeypatch.setattr(passes, "postponing", postponed)
