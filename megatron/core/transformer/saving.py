"""How the parts of a model keep what backward needs: as it is, made again, or in host memory.

A module asks once, in its constructor, how to run its parts, and then runs them so:

    run = saving.runner(owner, recomputed="core_attn")     y = run(f, *inputs)
    lend = saving.lender(owner, recomputed="layernorm")    with lend(f, *inputs) as y: ...

Under ``run`` the inputs are kept where it recomputes; under ``lend`` what ``f`` returns is made
again too, so that nothing in the block keeps it. Names are Megatron-LM's: of --recompute-modules,
and of --offload-modules.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn

from megatron.core.mesh import Axis, Mesh
from megatron.core.offload import Offloader
from megatron.core.recompute import Around, discarding, recompute
from megatron.core.transformer.offload_config import OffloadConfig
from megatron.core.transformer.recompute_config import RecomputeConfig

Runner = Callable[..., Any]
"""Takes a function and its tensors, and returns what it returns."""
Lender = Callable[..., AbstractContextManager[Any]]
"""Takes a function and its tensors, and gives to a block what it returns."""


class Saving:
    """What a run recomputes and offloads, of one part of a model."""

    def __init__(self, recompute: RecomputeConfig, offload: OffloadConfig, mesh: Mesh) -> None:
        self.recompute, self.offload, self._axis = recompute, offload, mesh.tp
        self._offloader: Offloader | None = None
        if offload.is_on:
            self._offloader = Offloader(mesh.device, offload.min_offloaded_tensor_size)

    def forward(self, shared: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Return what a forward pass runs in; ``shared`` is what all its layers read."""
        return nullcontext() if self._offloader is None else self._offloader.forward(shared)

    def runner(
        self, owner: nn.Module, *, recomputed: str | None = None, offloaded: str | None = None
    ) -> Runner:
        """Return how a part of a layer runs.

        Args:
            owner: holds its parameters.
            recomputed: its name in --recompute-modules, if it has one.
            offloaded: its name in --offload-modules, if it has one.
        """
        if recomputed in self.recompute.modules:
            return recompute
        if offloaded in self.offload.modules:
            return partial(_run_within, self._group(owner))
        return _run

    def lender(self, owner: nn.Module, *, recomputed: str, offloaded: str) -> Lender:
        """Return how a part of a layer runs whose results can be made again too."""
        around = self._group(owner) if offloaded in self.offload.modules else None
        if recomputed in self.recompute.modules:
            return partial(discarding, around=around or nullcontext)
        return _lend if around is None else partial(_lend_within, around)

    def units(self, layers: Mapping[int, nn.Module]) -> list[tuple[tuple[int, ...], Runner]]:
        """Return the numbers of a stage's layers in units, in order, and how each unit runs."""
        numbers, offloaded = list(layers), self.offload.cpu_offloading_num_layers
        axis = self._axis if self.recompute.distribute_saved_activations else None
        units = [(unit, self._whole(axis)) for unit in self.recompute.units(numbers)]
        for number in numbers[sum(len(unit) for unit, _ in units) :]:
            moves = number < offloaded
            run = partial(_run_within, self._group(layers[number])) if moves else _run
            units.append(((number,), run))
        return units

    def ahead(self) -> Runner:
        """Return how a layer of multi-token prediction runs as a whole."""
        return self._whole(None) if self.recompute.covers_prediction_ahead else _run

    def _whole(self, distribute: Axis | None) -> Runner:
        around = self._group() if "layer_input" in self.offload.modules else nullcontext
        return partial(recompute, distribute=distribute, around=around)

    def _group(self, owner: nn.Module | None = None) -> Around:
        assert self._offloader is not None
        return partial(self._offloader.group, tuple if owner is None else owner.parameters)


def _run(function: Callable[..., Any], *inputs: Tensor) -> Any:
    return function(*inputs)


def _run_within(around: Around, function: Callable[..., Any], *inputs: Tensor) -> Any:
    with around():
        return function(*inputs)


@contextmanager
def _lend(function: Callable[..., Any], *inputs: Tensor) -> Iterator[Any]:
    yield function(*inputs)


@contextmanager
def _lend_within(around: Around, function: Callable[..., Any], *inputs: Tensor) -> Iterator[Any]:
    with around():
        result = function(*inputs)
    yield result
