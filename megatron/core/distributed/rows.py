"""Parameters cut by rows, each on its own, as torch's ``fully_shard`` cuts them: plain arithmetic.

Every parameter is a bucket, and its shares are equal numbers of whole rows. Where rows do not
divide, the last shares are padding, in part or wholly:

    | w1, rows 0 1 | w1, row 2, padding | w2, row 0 | w2, row 1 |      3 and 2 rows in 2 shares

What is not said here is as in `layout`: buffers by key and update rule, places by optimizer group
and backwards in the model.
"""

from collections.abc import Sequence

from megatron.core.distributed import layout
from megatron.core.distributed.layout import BufferPlan, Item, Slot
from megatron.core.distributed.ranges import Range
from megatron.core.utils import divide, round_up


def plan_rows(items: Sequence[Item], shares: int) -> list[BufferPlan]:
    """Return the buffers of ``items``, ordered by the first item of each.

    Args:
        items: parameters in the model's order, with their rows.
        shares: ranks that keep a share of each parameter.
    """
    plans = []
    for (key, rule), indices in layout.by_buffer(items).items():
        slots: list[Slot] = []
        buckets: list[Range] = []
        position = 0
        for index in layout.in_order(items, indices):
            item = items[index]
            slots.append(Slot(index, item.name, position, position + item.numel))
            size = round_up(item.rows, shares) * divide(item.numel, item.rows)
            buckets.append((position, position + size))
            position += size
        segments = layout.segments_of(items, slots)
        plans.append(BufferPlan(key, tuple(slots), segments, tuple(buckets), position, rule))
    return plans
