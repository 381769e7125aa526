"""Whole parameters in equal shares: none crosses a bound, and the padding stays small."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from megatron.core.distributed import packing
from megatron.core.distributed.layout import Item, plan_buffers
from megatron.core.distributed.ranges import ALIGNMENT, intersect, merge
from megatron.core.optimizer.groups import Group
from megatron.core.utils import round_up

MATRICES = Group("matrices", "muon", True)


def whole(sizes: list[int]) -> list[Item]:
    return [Item(str(i), n, "k", MATRICES) for i, n in enumerate(sizes)]


def test_packing_by_hand() -> None:
    assert packing.pack([3, 1, 4, 4], 2) == (7, [0, 1, 0, 1])
    assert packing.pack([5, 5, 3, 3, 2], 2) == (10, [0, 1, 0, 1, 0])
    assert packing.pack([7], 3) == (7, [0])


def test_a_buffer_of_whole_parameters_by_hand() -> None:
    """Backwards in the model: d, c, b, a. The largest go first, each share in order."""
    (plan,) = plan_buffers(whole([128, 10, 64, 100]), shares=2)
    # Aligned: d 128, c 64, b 64, a 128. Share 0 gets d and c, share 1 gets a and b.
    assert [(slot.name, slot.start, slot.stop) for slot in plan.slots] == [
        ("3", 0, 100),
        ("2", 128, 192),
        ("1", 192, 202),
        ("0", 256, 384),
    ]
    assert plan.buckets == ((0, 384),) and plan.rule == "muon"
    assert plan.segments == (("matrices", (0, 384)),)


sizes_of = st.lists(st.integers(1, 700), min_size=1, max_size=14)


@given(
    sizes=sizes_of,
    groups=st.lists(st.sampled_from("ab"), min_size=14, max_size=14),
    data_size=st.integers(1, 6),
    bucket_size=st.none() | st.integers(1, 1500),
)
def test_no_parameter_crosses_a_share(
    sizes: list[int], groups: list[str], data_size: int, bucket_size: int | None
) -> None:
    items = [
        Item(str(i), n, "k", Group(group, "muon", True))
        for i, (n, group) in enumerate(zip(sizes, groups, strict=False))
    ]
    (plan,) = plan_buffers(items, data_size, bucket_size, shares=data_size)
    assert sorted(slot.index for slot in plan.slots) == list(range(len(items)))
    shares = [plan.shards(rank, data_size) for rank in range(data_size)]
    for before, slot in itertools.pairwise(plan.slots):
        assert before.stop <= slot.start
    for slot in plan.slots:
        assert slot.start % ALIGNMENT == 0
        assert slot.stop - slot.start == items[slot.index].numel
        assert plan.group_of(slot) == items[slot.index].group.name
        holders = [
            rank
            for rank, ranges in enumerate(shares)
            if any(intersect((slot.start, slot.stop), one) for one in ranges)
        ]
        assert len(holders) == 1
    flat = [edge for bucket in plan.buckets for edge in bucket]
    assert flat[0] == 0 and flat[-1] == plan.size and flat[1:-1:2] == flat[2:-1:2]
    assert merge(sorted(itertools.chain(*shares))) == [(0, plan.size)]
    # Largest first is at most a third above any other way of dealing them out (Graham, 1969).
    for start, stop in plan.buckets:
        held = [
            round_up(slot.stop - slot.start, ALIGNMENT)
            for slot in plan.slots
            if start <= slot.start < stop
        ]
        if len(held) <= 8:  # searching more takes long
            assert (stop - start) / data_size <= _fewest(tuple(held), data_size) * 4 / 3


def _fewest(sizes: tuple[int, ...], shares: int) -> int:
    """Return the capacity of the best of all ways to deal out; by depth-first search."""
    best = sum(sizes)

    def place(index: int, loads: tuple[int, ...]) -> None:
        nonlocal best
        if max(loads) >= best:
            return
        if index == len(sizes):
            best = max(loads)
            return
        for share in {load: i for i, load in enumerate(loads)}.values():
            more = list(loads)
            more[share] += sizes[index]
            place(index + 1, tuple(more))

    place(0, (0,) * shares)
    return best


@given(sizes=sizes_of, shares=st.integers(1, 6), bucket_size=st.integers(1, 1500))
def test_buckets_are_runs_that_end_with_little_padding(
    sizes: list[int], shares: int, bucket_size: int
) -> None:
    runs = packing.batches(sizes, shares, bucket_size)
    assert [index for run in runs for index in run] == list(range(len(sizes)))
    for run in runs[:-2]:  # the last two may have been joined
        held = sizes[run.start : run.stop]
        capacity, _ = packing.pack(held, shares)
        assert sum(held) >= bucket_size
        assert capacity * shares <= sum(held) * (1 + packing.SLACK)
    assert packing.batches(sizes, shares, None) == [range(len(sizes))]


def test_a_bucket_goes_on_until_its_shares_are_full() -> None:
    """One matrix of four for four ranks would be three quarters padding."""
    assert packing.batches([4] * 12, 4, 4) == [range(0, 4), range(4, 8), range(8, 12)]
    assert packing.batches([4, 1] * 6, 4, 4) == [range(0, 12)]
    # What is left over goes into the padding of the last bucket where there is room.
    assert packing.batches([9] * 5, 4, 33) == [range(0, 4), range(4, 5)]
    assert packing.batches([9, 8, 8, 8, 1, 1, 1], 4, 33) == [range(0, 7)]


def test_rules_share_no_buffer() -> None:
    items = [
        Item("w", 64, "k", MATRICES),
        Item("b", 3, "k", Group("no_decay", "adam", False)),
        Item("v", 64, "k", MATRICES),
    ]
    matrices, rest = plan_buffers(items, data_size=2, shares=2)
    assert [slot.name for slot in matrices.slots] == ["v", "w"] and matrices.size == 128
    assert (rest.rule, rest.key, rest.size) == ("adam", "k", 128)
