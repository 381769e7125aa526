"""Where each parameter lies in its flat buffer: plain arithmetic, so a dry run knows every byte.

Parameters that are alike to collectives (one dtype, gradients summed over one set of axes) share a
buffer. Within it they are ordered by optimizer group, so that one fused call updates a group, and
backwards in the model within a group, so that the gradients of the first bucket are ready first:

    | group "decay": last layer ... first layer | group "no_decay": ... | padding |
    |  bucket 0      |  bucket 1      |  bucket 2 ...                             |

Every parameter starts at a multiple of `ALIGNMENT` elements, every bucket is a whole number of
aligned shares for the data-parallel ranks. Gaps hold zeros for ever: nobody writes to them.

A buffer has one update rule. Where the rule needs whole matrices and ranks hold shares, `packing`
deals them to the shares of a bucket, and groups lie in order within a share.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from megatron.core.distributed import packing
from megatron.core.distributed.ranges import ALIGNMENT, Range
from megatron.core.utils import divide, round_up

IN_FLIGHT = 1
"""Sums that run beside a backward, where gradients are shared out: memory for one unit's each."""


class Grouped(Protocol):
    """What an optimizer group says of where its parameters may lie."""

    @property
    def name(self) -> str: ...
    @property
    def rule(self) -> str: ...
    @property
    def needs_whole(self) -> bool: ...


@dataclass(frozen=True)
class Item:
    """A parameter to be placed."""

    name: str
    numel: int
    key: Hashable
    """Parameters with equal keys share a buffer."""
    group: Grouped
    """Optimizer group. Groups lie in alphabetical order, and those of different rules share no
    buffer."""
    rows: int = 1
    """Size of the first dim, where that is cut (`rows`)."""


@dataclass(frozen=True)
class Slot:
    """The place of one parameter."""

    index: int
    """Position in the list of items."""
    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class BufferPlan:
    """The layout of one flat buffer."""

    key: Hashable
    slots: tuple[Slot, ...]
    """In the order of their places."""
    segments: tuple[tuple[str, Range], ...]
    """(group, range) of each run of parameters of one optimizer group, in order."""
    buckets: tuple[Range, ...]
    """Ranges that one collective reduces; they tile the buffer."""
    size: int
    """Elements, gaps and padding included."""
    rule: str = ""
    """Update rule of all of it."""

    def group_of(self, slot: Slot) -> str:
        """Return the optimizer group of a slot."""
        return next(group for group, (start, stop) in self.segments if start <= slot.start < stop)

    def shards(self, coordinate: int, count: int) -> list[Range]:
        """Return the ranges that one of ``count`` ranks updates: an equal share of each bucket.

        A single rank has one range, the whole buffer.
        """
        if count == 1:
            return [(0, self.size)]
        ranges = []
        for start, stop in self.buckets:
            share = divide(stop - start, count)
            ranges.append((start + coordinate * share, start + (coordinate + 1) * share))
        return ranges


def plan_buffers(
    items: Sequence[Item],
    data_size: int = 1,
    bucket_size: int | None = None,
    *,
    shares: int = 1,
) -> list[BufferPlan]:
    """Return the buffers that hold ``items``, ordered by the first item of each.

    Args:
        items: parameters in the model's order.
        data_size: ranks that every bucket must divide over.
        bucket_size: elements after which a bucket is closed; absent, a buffer is one bucket.
        shares: ranks that update a share of each bucket, among which whole matrices are dealt out.
    """
    plans = []
    for (key, rule), indices in by_buffer(items).items():
        ordered = in_order(items, indices)
        if shares > 1 and items[indices[0]].group.needs_whole:
            slots, buckets = _place_whole(items, ordered, shares, bucket_size)
        else:
            slots, buckets = _place(items, ordered, data_size, bucket_size)
        segments = segments_of(items, slots)
        plans.append(BufferPlan(key, slots, segments, buckets, buckets[-1][1], rule))
    return plans


def by_buffer(items: Sequence[Item]) -> dict[tuple[Hashable, str], list[int]]:
    """Return the numbers of the items of each buffer, by key and update rule."""
    keyed: dict[tuple[Hashable, str], list[int]] = {}
    for index, item in enumerate(items):
        keyed.setdefault((item.key, item.group.rule), []).append(index)
    return keyed


def in_order(items: Sequence[Item], indices: Sequence[int]) -> list[int]:
    """Return items of one buffer in the order of their places."""
    return sorted(indices, key=lambda index: (items[index].group.name, -index))


_Places = tuple[tuple[Slot, ...], tuple[Range, ...]]
"""Slots and buckets."""


def _place(
    items: Sequence[Item], ordered: Sequence[int], data_size: int, bucket_size: int | None
) -> _Places:
    """Lay parameters out one after the other; shares cut them where they will."""
    slots: list[Slot] = []
    buckets: list[Range] = []
    bucket_start = position = 0
    for index in ordered:
        item = items[index]
        slots.append(Slot(index, item.name, position, position + item.numel))
        position = round_up(position + item.numel, ALIGNMENT)
        last = index == ordered[-1]
        if last or (bucket_size is not None and position - bucket_start >= bucket_size):
            position = bucket_start + round_up(position - bucket_start, ALIGNMENT * data_size)
            buckets.append((bucket_start, position))
            bucket_start = position
    return tuple(slots), tuple(buckets)


def _place_whole(
    items: Sequence[Item], ordered: Sequence[int], count: int, bucket_size: int | None
) -> _Places:
    """Deal parameters to ``count`` shares of each bucket, so that no share's bound cuts one."""
    sizes = [round_up(items[index].numel, ALIGNMENT) for index in ordered]
    slots: list[Slot] = []
    buckets: list[Range] = []
    bucket_start = 0
    for batch in packing.batches(sizes, count, bucket_size):
        capacity, shares = packing.pack(sizes[batch.start : batch.stop], count)
        position = [bucket_start + share * capacity for share in range(count)]
        for number, share in zip(batch, shares, strict=True):
            item, start = items[ordered[number]], position[share]
            slots.append(Slot(ordered[number], item.name, start, start + item.numel))
            position[share] += sizes[number]
        buckets.append((bucket_start, bucket_start + capacity * count))
        bucket_start = buckets[-1][1]
    return tuple(sorted(slots, key=lambda slot: slot.start)), tuple(buckets)


def segments_of(items: Sequence[Item], slots: Sequence[Slot]) -> tuple[tuple[str, Range], ...]:
    """Return the runs of slots of one optimizer group, with its name."""
    runs: list[tuple[str, Range]] = []
    for slot in slots:
        group = items[slot.index].group.name
        if runs and runs[-1][0] == group:
            runs[-1] = (group, (runs[-1][1][0], slot.stop))
        else:
            runs.append((group, (slot.start, slot.stop)))
    return tuple(runs)


def bridge_gaps(ranges: Sequence[Range], plan: BufferPlan) -> list[Range]:
    """Join ranges of neighbouring parameters over the gap of zeros between them."""
    following = {slot.stop: after.start for slot, after in pairwise(plan.slots)}
    joined: list[Range] = []
    for start, stop in ranges:
        if joined and following.get(joined[-1][1]) == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def unit_of(path: str) -> str:
    """Return the part of a model that a parameter is gathered and reduced with, from its path.

    A layer of a stack is one, and so is each other child of the model.

    >>> unit_of("decoder.layers.3.mlp.linear_fc1.weight")
    'decoder.layers.3'
    >>> unit_of("embedding.word_embeddings.weight")
    'embedding'
    >>> unit_of("decoder.final_layernorm.weight")
    'decoder'
    >>> unit_of("weight")
    ''
    """
    parents = path.split(".")[:-1]
    numbers = [place for place, part in enumerate(parents) if part.isdigit()]
    return ".".join(parents[: numbers[0] + 1] if numbers else parents[:1])
