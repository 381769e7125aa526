"""One record per parameter: what it is of the logical model, and how its gradient is summed.

A layer attaches a `Sharding` to each parameter it makes. It holds the logical (global, unpadded)
shape and a list of *regions*: boxes of the local tensor that are boxes of the logical one, with
the axes the box is replicated on and the axes its gradient must be summed over. A plain parameter
has one region; the first matrix of a gated MLP has two (gate, up); rows that only pad a
vocabulary lie in none. Initialisation, gradient sums, norm, clipping, weight decay, checkpoints
and export read this record and nothing else.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

Box = tuple[tuple[int, int], ...]
"""Half-open (start, stop) per dim."""


def box_shape(box: Box) -> tuple[int, ...]:
    """Return the extent of a box per dim."""
    return tuple(stop - start for start, stop in box)


def box_slices(box: Box) -> tuple[slice, ...]:
    """Return the index that cuts a box out of a tensor."""
    return tuple(slice(start, stop) for start, stop in box)


@dataclass(frozen=True)
class Region:
    """A box of the local tensor that is a box of the logical tensor, of equal shape."""

    local: Box
    logical: Box
    replicated: tuple[str, ...] = ()
    """Mesh axes along which every rank holds this box."""
    summed: tuple[str, ...] = ()
    """Mesh axes along which ranks hold partial gradients of this box."""

    def __post_init__(self) -> None:
        assert box_shape(self.local) == box_shape(self.logical), f"{self.local} != {self.logical}"


@dataclass(frozen=True)
class Init:
    """How a parameter starts; drawn by `megatron.core.rng` so that no layout changes it."""

    kind: Literal["normal", "uniform", "constant"] = "constant"
    scale: float = 0.0
    """Standard deviation (normal), half width (uniform) or the value itself (constant)."""


@dataclass(frozen=True)
class Sharding:
    """What one local parameter is of the logical model."""

    shape: tuple[int, ...]
    """Logical shape, without padding."""
    regions: tuple[Region, ...]
    init: Init
    name: str = ""
    """Logical name; `name_parameters` fills it in from the module path."""
    decay: bool = True
    """Weight decay applies; false for biases, norms and other vectors."""
    matrix: bool = False
    """A whole matrix for optimizers that treat matrices apart (Muon); false for embeddings."""
    fused: tuple[tuple[str, int], ...] = ()
    """Matrices that this one is made of: (name, rows) of each, a pattern that repeats down the
    rows. Empty for a matrix that is one."""
    qk_norm: bool = False
    """Gain of a query or key norm, which --apply-wd-to-qk-layernorm decays."""
    embedding: bool = False
    """Input embedding or output head: the decoupled learning rate applies."""
    tied: bool = False
    """A second copy of the logical tensor lives on another pipeline stage."""
    expert: bool = False
    """Its replicas are those of experts (axis ``edp``), not those of the dense layers (``dp_cp``):
    it has seen the tokens of all ranks along ``ep`` and ``etp`` already."""

    def owned(self, coordinates: Mapping[str, int]) -> tuple[Region, ...]:
        """Return the regions whose elements the rank at ``coordinates`` owns.

        Each logical element has one owner: coordinate 0 on every axis it is replicated on, and the
        first of the stages that hold a tied tensor.
        """
        if self.tied and coordinates.get("pp", 0) > 0:
            return ()
        return tuple(
            region
            for region in self.regions
            if all(coordinates.get(axis, 0) == 0 for axis in region.replicated)
        )


def whole(
    shape: Sequence[int],
    init: Init,
    *,
    replicated: Sequence[str] = (),
    summed: Sequence[str] = (),
    decay: bool = True,
    matrix: bool = False,
) -> Sharding:
    """Return the record of a parameter that every rank of the model-parallel group holds whole."""
    box = tuple((0, size) for size in shape)
    region = Region(box, box, tuple(replicated), tuple(summed))
    return Sharding(tuple(shape), (region,), init, decay=decay, matrix=matrix)


def split(
    shape: Sequence[int],
    init: Init,
    dim: int,
    coordinate: int,
    size: int,
    *,
    parts: int = 1,
    decay: bool = True,
    matrix: bool = True,
) -> Sharding:
    """Return the record of a parameter cut along ``dim`` into ``size`` equal shares.

    With ``parts`` > 1 the dim holds that many equal blocks (gate and up of a gated unit), each cut
    on its own; the local tensor holds this rank's share of every block, one after the other.
    """
    block = shape[dim] // parts
    share = block // size
    assert share * size * parts == shape[dim], f"dim {dim} of {tuple(shape)}: {parts} x {size}"
    regions = []
    for part in range(parts):
        local = [(0, extent) for extent in shape]
        logical = [(0, extent) for extent in shape]
        local[dim] = (part * share, (part + 1) * share)
        start = part * block + coordinate * share
        logical[dim] = (start, start + share)
        regions.append(Region(tuple(local), tuple(logical)))
    return Sharding(tuple(shape), tuple(regions), init, decay=decay, matrix=matrix)


def attach(parameter: nn.Parameter, sharding: Sharding) -> nn.Parameter:
    """Give ``parameter`` its record and return it."""
    parameter.sharding = sharding  # type: ignore[attr-defined]
    return parameter


def of(parameter: torch.Tensor) -> Sharding:
    """Return the record of a parameter."""
    record = getattr(parameter, "sharding", None)
    assert isinstance(record, Sharding), (
        f"parameter of shape {tuple(parameter.shape)} has no record"
    )
    return record


def is_there(x: torch.Tensor) -> bool:
    """Return whether a tensor has its memory: that of weights shared out comes and goes.

    A read of one that has not raises no error.
    """
    return x.numel() == 0 or x.untyped_storage().size() > 0


def name_parameters(module: nn.Module) -> None:
    """Name every record after its module path.

    Layers are registered under their number in the whole model, so the path is the logical name on
    every layout. A parameter that has a name keeps it: one that two modules share has the path in
    the first, and a tied one that of its twin.
    """
    for path, parameter in module.named_parameters():
        if not of(parameter).name:
            attach(parameter, replace(of(parameter), name=path))  # type: ignore[arg-type]


def local_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Box, int]]:
    """Yield the boxes that tile the flat range [start, stop) of a row-major ``shape``.

    At most 2n-1 boxes for n dims, each with the flat offset of its first element.
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield ((start, stop),) if shape else (), start
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows are [first, last)
    if first > last:  # inside one row
        yield from _inner(shape, first - 1, start - (first - 1) * row, stop - (first - 1) * row)
        return
    if start < first * row:
        yield from _inner(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        rest = tuple((0, size) for size in shape[1:])
        yield ((first, last), *rest), first * row
    if last * row < stop:
        yield from _inner(shape, last, 0, stop - last * row)


def _inner(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[tuple[Box, int]]:
    size = math.prod(shape[1:])
    for box, offset in local_boxes(shape[1:], start, stop):
        yield ((row, row + 1), *box), offset + row * size
