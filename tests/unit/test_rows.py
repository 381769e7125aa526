"""Parameters cut by rows: torch's own chunks are the oracle."""

import itertools
import math

import pytest
import torch

from megatron.core.distributed.layout import BufferPlan, Item
from megatron.core.distributed.ranges import Range, intersect
from megatron.core.distributed.rows import plan_rows
from megatron.core.optimizer.groups import Group

SHAPES = [(1,), (2, 3), (3,), (5, 2, 2), (7, 1), (8, 4)]


def kept(plan: BufferPlan, number: int, span: Range) -> list[int]:
    """Return which elements of a parameter lie in a span."""
    slot = next(slot for slot in plan.slots if slot.index == number)
    common = intersect((slot.start, slot.stop), span)
    return [] if common is None else [*range(common[0] - slot.start, common[1] - slot.start)]


@pytest.mark.parametrize("shares", [2, 3, 4, 9])
def test_a_share_is_the_chunk_that_torch_keeps(shares: int) -> None:
    group = Group("all", "adam", True)
    items = [Item(f"w{i}", math.prod(shape), "", group, shape[0]) for i, shape in enumerate(SHAPES)]
    (plan,) = plan_rows(items, shares)
    assert [slot.index for slot in plan.slots] == [5, 4, 3, 2, 1, 0]
    for rank, (number, shape) in itertools.product(range(shares), enumerate(SHAPES)):
        elements = torch.arange(math.prod(shape)).view(shape)
        chunks = elements.chunk(shares)  # fewer than shares, where rows are few
        expected = chunks[rank].flatten().tolist() if rank < len(chunks) else []
        place = [slot.index for slot in plan.slots].index(number)
        span = plan.shards(rank, shares)[place]
        assert kept(plan, number, span) == expected
        assert span[1] - span[0] == chunks[0].numel()  # each rank's memory is that of the first
    assert plan.size == sum(stop - start for start, stop in plan.buckets)
