"""Ranges of elements along one line: what they have in common, and what a box is in them."""

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

from megatron.core.utils import round_up

ALIGNMENT = 64
"""Elements; a multiple of every vector width, and of a cache line in any dtype."""

Range = tuple[int, int]
"""Half-open (start, stop) in elements."""
Part = tuple[int, slice]
"""A slice of the span with this number."""


def intersect(first: Range, second: Range) -> Range | None:
    """Return the common part of two ranges, or None when there is none."""
    start, stop = max(first[0], second[0]), min(first[1], second[1])
    return (start, stop) if start < stop else None


def box_ranges(shape: Sequence[int], box: Sequence[Range]) -> Iterator[Range]:
    """Yield the flat ranges that a box covers in a row-major tensor of ``shape``, in order."""
    if any(start >= stop for start, stop in box):
        return
    # Dims from `inner` on are covered whole, so a step along the dim before them is contiguous.
    inner = len(shape)
    while inner > 0 and box[inner - 1] == (0, shape[inner - 1]):
        inner -= 1
    if inner == 0:
        yield 0, math.prod(shape)
        return
    row = math.prod(shape[inner:])
    start, stop = box[inner - 1]
    for base in _offsets(shape[: inner - 1], box[: inner - 1]):
        offset = base * shape[inner - 1]
        yield (offset + start) * row, (offset + stop) * row


def _offsets(shape: Sequence[int], box: Sequence[Range]) -> Iterator[int]:
    """Yield the flat index of every position of a box, row-major."""
    if not shape:
        yield 0
        return
    for base in _offsets(shape[:-1], box[:-1]):
        yield from range(base * shape[-1] + box[-1][0], base * shape[-1] + box[-1][1])


def merge(ranges: Sequence[Range]) -> list[Range]:
    """Return ascending ranges joined where nothing lies between them."""
    merged: list[Range] = []
    for start, stop in ranges:
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged


def cut(ranges: Iterable[Range], spans: Sequence[Range]) -> list[Part]:
    """Return the parts of ``ranges`` that lie in ``spans``, which are in order and may be many."""
    found: list[Part] = []
    for each in ranges:
        first = bisect_right(spans, each[0], key=lambda span: span[1])
        for number in range(first, len(spans)):
            start, stop = spans[number]
            common = intersect(each, (start, stop))
            if common is not None:
                found.append((number, slice(common[0] - start, common[1] - start)))
            elif start >= each[1]:
                break
    return found


def first_elements(total: int, fraction: float) -> int:
    """Return how many of ``total`` elements `first_part` takes."""
    return min(round_up(math.ceil(total * fraction), ALIGNMENT), total)


def first_part(spans: Sequence[Range], fraction: float) -> tuple[list[Part], list[Part]]:
    """Return the first ``fraction`` of ``spans``, rounded up to `ALIGNMENT`, and the rest.

    >>> first_part([(0, 128), (256, 384)], 0.75)
    ([(0, slice(0, 128, None)), (1, slice(0, 64, None))], [(1, slice(64, 128, None))])
    """
    sizes = [stop - start for start, stop in spans]
    left = first_elements(sum(sizes), fraction)
    first: list[Part] = []
    rest: list[Part] = []
    for number, size in enumerate(sizes):
        taken = min(left, size)
        left -= taken
        if taken:
            first.append((number, slice(0, taken)))
        if taken < size:
            rest.append((number, slice(taken, size)))
    return first, rest
