"""What a rank keeps and updates of parameters: pieces of them, whatever holds the memory.

A plan (`layout`) gives parameters their places along one line. `Shares` says what replicas share
out, hence which ranges of the line (`spans`) this rank updates. There lie its pieces of weights and
of gradients, one tensor for each span; the optimizer, sums over model-parallel axes and checkpoints
see nothing else.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.core import sharding
from megatron.core.distributed.config import Strategy, shares_gradients, shares_weights
from megatron.core.distributed.layout import BufferPlan, Grouped
from megatron.core.distributed.ranges import Part, Range, box_ranges, cut, intersect, merge
from megatron.core.mesh import Axis, Mesh
from megatron.core.sharding import Sharding

GroupOf = Callable[[Sharding], Grouped]
"""Gives the optimizer group of a parameter."""
Fill = Callable[[nn.Parameter], None]
"""Gives a parameter its initial values."""


@dataclass(frozen=True)
class Shares:
    """How replicas share a buffer out."""

    strategy: Strategy
    axis: Axis
    """Ranks among which it is shared out."""
    copies: Axis
    """Ranks that hold the same share."""

    @property
    def replicas(self) -> int:
        """Return how many replicas there are."""
        return self.axis.size * self.copies.size

    @property
    def gradients(self) -> bool:
        """Return whether each rank keeps its share of the gradients only."""
        return shares_gradients(self.strategy)

    @property
    def weights(self) -> bool:
        """Return whether each rank keeps its share of the weights only."""
        return shares_weights(self.strategy)


@dataclass(frozen=True)
class Member:
    """The part of one parameter that lies in one range of a buffer."""

    record: Sharding
    shape: tuple[int, ...]
    """Of the whole local parameter."""
    range: int
    """Number of the range."""
    place: slice
    """Elements of the range."""
    start: int
    """Offset in the flattened local parameter of the first of them."""

    @property
    def stop(self) -> int:
        """Return the offset after the last of them."""
        return self.start + (int(self.place.stop) - int(self.place.start))


class Pieces:
    """Parameters along one line, and this rank's pieces of their weights and gradients.

    Args:
        plan: places along the line.
        parameters: those that the plan's slots number, with records and local shapes.
        shares: what replicas share out.
    """

    weight_pieces: list[Tensor]
    """Weights in `spans`, one-dimensional and always there."""
    grad_pieces: list[Tensor]
    """Gradients in `spans`, likewise. They are whole once they are reduced."""
    spans: list[Range]
    """What this rank updates: its share of every bucket."""
    summed: tuple[str, ...]
    """Model-parallel axes that some region's gradient is summed over."""
    is_tied: bool
    """Another stage holds a copy of its one parameter."""

    def __init__(
        self, plan: BufferPlan, parameters: Sequence[nn.Parameter], shares: Shares
    ) -> None:
        self.plan, self.shares = plan, shares
        self.parameters = tuple(parameters[slot.index] for slot in plan.slots)
        first = sharding.of(self.parameters[0])
        self.summed, self.is_tied = summed_axes(first), first.tied
        self.spans = plan.shards(shares.axis.coordinate, shares.axis.size)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the weights that this rank keeps."""
        return self.weight_pieces[0].dtype

    @property
    def grad_dtype(self) -> torch.dtype:
        """Return the dtype of the gradients that this rank keeps."""
        return self.grad_pieces[0].dtype

    @property
    def device(self) -> torch.device:
        """Return where the pieces are."""
        return self.grad_pieces[0].device

    def held(self) -> dict[str, int]:
        """Return the bytes of the ``weights`` and ``gradients`` that this rank keeps."""
        kinds = {"weights": self.weight_pieces, "gradients": self.grad_pieces}
        return {name: sum(piece.nbytes for piece in pieces) for name, pieces in kinds.items()}

    def members(self, part: Range, number: int) -> Iterator[Member]:
        """Yield the parts of parameters in a range of the buffer, which is called ``number``."""
        slots = self.plan.slots
        first = bisect_right(slots, part[0], key=lambda slot: slot.stop)
        last = bisect_left(slots, part[1], key=lambda slot: slot.start)
        for slot, parameter in zip(slots[first:last], self.parameters[first:last], strict=True):
            common = intersect((slot.start, slot.stop), part)
            if common is not None:
                yield Member(
                    sharding.of(parameter),
                    tuple(parameter.shape),
                    number,
                    slice(common[0] - part[0], common[1] - part[0]),
                    common[0] - slot.start,
                )

    def owned_ranges(self, mesh: Mesh) -> list[Range]:
        """Return the ranges of the elements that this rank answers for in sums over the world.

        Each logical element is answered for once: rows that only pad a vocabulary, what another
        rank owns and what another replica counts are left out. Of what is shared out, this rank
        answers for what lies in `spans`.
        """
        if self.shares.copies.coordinate > 0:
            return []
        coordinates = {axis.name: axis.coordinate for axis in mesh.axes.values()}
        return self._ranges(lambda record: record.owned(coordinates))

    def summed_ranges(self, axis: str) -> list[Range]:
        """Return the ranges whose gradients are partial along ``axis``.

        Padding lies in no region, but its gradient is zero on every rank: where all regions are
        partial, all of the buffer counts as such.
        """
        regions = [r for p in self.parameters for r in sharding.of(p).regions]
        if all(axis in region.summed for region in regions):
            return [(0, self.plan.size)]
        return self._ranges(lambda record: (r for r in record.regions if axis in r.summed))

    def _ranges(self, regions_of: Callable[[Sharding], Iterable[sharding.Region]]) -> list[Range]:
        ranges: list[Range] = []
        for slot, parameter in zip(self.plan.slots, self.parameters, strict=True):
            mine = [
                (slot.start + start, slot.start + stop)
                for region in regions_of(sharding.of(parameter))
                for start, stop in box_ranges(parameter.shape, region.local)
            ]
            ranges += merge(sorted(mine))
        return ranges

    def cut(self, ranges: Iterable[Range]) -> list[Part]:
        """Return the parts of ``ranges`` that lie in `spans`."""
        return cut(ranges, self.spans)


def summed_axes(record: Sharding) -> tuple[str, ...]:
    """Return the axes that some region of a parameter is summed over."""
    return tuple(sorted({axis for region in record.regions for axis in region.summed}))


def provide(parameter: nn.Parameter, fill: Fill | None) -> None:
    """Give a parameter without memory some, and its values."""
    if not sharding.is_there(parameter):
        assert fill is not None, "a parameter has no memory, and nobody fills it"
        parameter.data = torch.empty_like(parameter)
        fill(parameter)


def weights(buffers: Iterable[Pieces]) -> Iterator[tuple[Member, Tensor]]:
    """Yield what this rank updates of each parameter, as flat views."""
    return _parts((each, each.weight_pieces) for each in buffers)


def gradients(buffers: Iterable[Pieces]) -> Iterator[tuple[Member, Tensor]]:
    """Yield what this rank has of each parameter's reduced gradient, as flat views."""
    return _parts((each, each.grad_pieces) for each in buffers)


def _parts(held: Iterable[tuple[Pieces, list[Tensor]]]) -> Iterator[tuple[Member, Tensor]]:
    for each, mine in held:
        for number, span in enumerate(each.spans):
            for member in each.members(span, number):
                yield member, mine[number][member.place]
