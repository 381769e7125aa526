"""Arithmetic on boxes of a tensor, and on runs of numbers, which are boxes of one dim."""

import math
from collections.abc import Iterator, Sequence

from megatron.core.sharding import Box, box_shape


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return tuple((0, size) for size in shape)


def volume(box: Box) -> int:
    """Return the number of elements in a box."""
    return math.prod(box_shape(box))


def intersection(a: Box, b: Box) -> Box | None:
    """Return the box common to both, or None where they share no element."""
    common = []
    for (start, stop), (first, last) in zip(a, b, strict=True):
        low, high = max(start, first), min(stop, last)
        if low >= high:
            return None
        common.append((low, high))
    return tuple(common)


def relative(box: Box, frame: Box) -> Box:
    """Return ``box`` counted from the first corner of ``frame``."""
    return tuple(
        (start - origin, stop - origin)
        for (start, stop), (origin, _) in zip(box, frame, strict=True)
    )


def shifted(box: Box, source: Box, target: Box) -> Box:
    """Return ``box``, given in the coordinates of ``source``, in those of ``target``."""
    return tuple(
        (start - old + new, stop - old + new)
        for (start, stop), (old, _), (new, _) in zip(box, source, target, strict=True)
    )


def spans(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield the ends of runs that tile ``start`` to ``stop`` in order, of ``step`` numbers each.

    The last one may be shorter.
    """
    for first in range(start, stop, step):
        yield first, min(first + step, stop)


def slabs(box: Box, itemsize: int, limit: int) -> Iterator[Box]:
    """Yield boxes that tile ``box`` in row-major order, each of at most ``limit`` bytes.

    An element is never cut, so that a limit below its size gives single elements.
    """
    if not box:
        yield box
        return
    (start, stop), inner = box[0], box[1:]
    row = volume(inner) * itemsize
    if row <= limit or not inner:
        step = max(limit // row, 1) if row else max(stop - start, 1)
        for rows in spans(start, stop, step):
            yield (rows, *inner)
        return
    for number in range(start, stop):
        for rest in slabs(inner, itemsize, limit):
            yield ((number, number + 1), *rest)


def uncovered(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Say why ``boxes`` do not hold every element of ``shape`` exactly once; None if they do.

    Exact: boxes that lie inside, do not overlap and have the tensor's volume tile it. Overlaps are
    found by a sweep along the first dim, so a tensor cut into rows costs one sort.
    """
    for box in boxes:
        inside = len(box) == len(shape) and all(
            0 <= start <= stop <= size for (start, stop), size in zip(box, shape, strict=False)
        )
        if not inside:
            return f"box {list(box)} lies outside of shape {list(shape)}"
    pair = _overlap([box for box in boxes if volume(box)])
    if pair is not None:
        return f"boxes {list(pair[0])} and {list(pair[1])} overlap"
    total, held = math.prod(shape), sum(volume(box) for box in boxes)
    return f"{total - held} of {total} elements are in no box" if held < total else None


def _overlap(boxes: list[Box]) -> tuple[Box, Box] | None:
    active: list[Box] = []
    for box in sorted(boxes):
        active = [other for other in active if not box or other[0][1] > box[0][0]]
        for other in active:
            if intersection(box, other) is not None:
                return other, box
        active.append(box)
    return None
