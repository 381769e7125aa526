"""One two-way mapping as data: boxes of their tensors that are boxes of ours.

A family lists a `Copy` for each such pair of boxes, once; read backwards it is the other direction.
Whether every element on both sides is in exactly one copy is arithmetic on boxes, done before a
byte moves: what is left over, missing or of another shape is refused by name. Reading goes by
boxes too, so that a tensor need not fit into memory.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.boxes import (
    intersection,
    relative,
    uncovered,
    whole_box,
)
from megatron.core.dist_checkpointing.format import DTYPES, dtype_name
from megatron.core.dist_checkpointing.stream import ReadSlab, Shape
from megatron.core.sharding import Box, box_shape, box_slices
from megatron.core.utils import UserError

MOST_NAMES = 20
"""Of one kind of problem, in a message."""


@dataclass(frozen=True)
class Copy:
    """A box of one tensor that is a box of another, mirrored where ``transposed``.

    Where one has a dim more, its first one counts matrices, of which the box has one.
    """

    source: str
    source_box: Box
    target: str
    target_box: Box
    transposed: bool = False

    def __post_init__(self) -> None:
        shape, theirs = box_shape(self.target_box), box_shape(self.source_box)
        if self.transposed:
            shape = shape[::-1]
        longer, shorter = sorted((shape, theirs), key=len, reverse=True)
        stacked = len(longer) - len(shorter)
        assert longer == (1,) * stacked + shorter and stacked <= 1, self

    def reversed(self) -> "Copy":
        """Return the same pair for the other direction."""
        return Copy(
            self.target, self.target_box, self.source, self.source_box, transposed=self.transposed
        )


def whole(source: str, target: str, *shape: int, transposed: bool = False) -> Copy:
    """Return the copy of a whole tensor; ``shape`` is the target's."""
    box = whole_box(shape)
    return Copy(source, box[::-1] if transposed else box, target, box, transposed)


class Plan:
    """All copies of one direction, known to be complete.

    Args:
        copies: of this direction.
        sources: the tensors that there are.
        targets: shapes of those that are wanted.
        what: names of the two sides in messages.

    Raises:
        UserError: a tensor is missing, left over or of another shape; the message has all of them.
    """

    def __init__(
        self,
        copies: Iterable[Copy],
        sources: Mapping[str, Shape],
        targets: Mapping[str, tuple[int, ...]],
        what: tuple[str, str],
    ) -> None:
        self.sources, self.targets = sources, targets
        self.by_target: dict[str, list[Copy]] = {}
        by_source: dict[str, list[Copy]] = {}
        for copy in copies:
            self.by_target.setdefault(copy.target, []).append(copy)
            by_source.setdefault(copy.source, []).append(copy)
        wanted = {key: _extent([c.source_box for c in group]) for key, group in by_source.items()}
        there = {key: shape.shape for key, shape in sources.items()}
        _refuse(_unequal(wanted, there, what[0]))
        made = {
            key: _extent([c.target_box for c in group]) for key, group in self.by_target.items()
        }
        _refuse(_unequal(dict(targets), made, what[1]))
        for key, group in by_source.items():
            _check(key, there[key], [copy.source_box for copy in group])
        for key, group in self.by_target.items():
            _check(key, targets[key], [copy.target_box for copy in group])

    def dtype(self, target: str) -> str:
        """Return the dtype that holds every value of a target's sources."""
        found = DTYPES[self.sources[self.by_target[target][0].source].dtype]
        for copy in self.by_target[target][1:]:
            found = torch.promote_types(found, DTYPES[self.sources[copy.source].dtype])
        return dtype_name(found)

    def read(self, target: str, box: Box, dtype: str, read: ReadSlab) -> Tensor:
        """Return a box of a target in ``dtype``, put together from what ``read`` gives."""
        out = torch.empty(box_shape(box), dtype=DTYPES[dtype])
        for copy in self.by_target[target]:
            common = intersection(copy.target_box, box)
            if common is None:
                continue
            inner = relative(common, copy.target_box)
            if copy.transposed:
                inner = inner[::-1]
            if len(copy.source_box) > len(inner):
                inner = ((0, 1), *inner)
            elif len(copy.source_box) < len(inner):
                inner = inner[1:]
            wanted = tuple(
                (start + first, start + last)
                for (start, _), (first, last) in zip(copy.source_box, inner, strict=True)
            )
            part = read(copy.source, wanted)
            part = part.t() if copy.transposed else part.reshape(box_shape(common))
            out[box_slices(relative(common, box))] = part
        return out


def _extent(boxes: Sequence[Box]) -> tuple[int, ...]:
    """Return the shape that boxes reach to."""
    return tuple(max(box[dim][1] for box in boxes) for dim in range(len(boxes[0])))


def _unequal(
    wanted: Mapping[str, tuple[int, ...]], there: Mapping[str, tuple[int, ...]], what: str
) -> list[str]:
    """Return what is wrong with the tensors of one side."""
    missing = [key for key in wanted if key not in there]
    extra = [key for key in there if key not in wanted]
    misshapen = [
        f"{key} {list(there[key])} instead of {list(shape)}"
        for key, shape in wanted.items()
        if key in there and there[key] != shape
    ]
    return [
        f"{len(names)} tensor(s) {word} in {what}: {_some(names)}"
        for word, names in (
            ("missing", missing),
            ("that nothing takes", extra),
            ("of another shape", misshapen),
        )
        if names
    ]


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MOST_NAMES])
    return shown if len(names) <= MOST_NAMES else f"{shown} and {len(names) - MOST_NAMES} more"


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise UserError("; ".join(problems))


def _check(key: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    problem = uncovered(shape, boxes)
    assert problem is None, f"{key}: {problem}"
