"""Flat buffers: the layout by hand, views that stay views, fp32 gradients of bf16 parameters."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megatron.core import comm, held, sharding
from megatron.core.distributed import layout
from megatron.core.distributed.buffers import build_buffers
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.distributed.layout import Item, plan_buffers
from megatron.core.distributed.pieces import Shares
from megatron.core.distributed.ranges import box_ranges, merge
from megatron.core.mesh import Axis, Mesh
from megatron.core.optimizer.groups import Group
from megatron.core.sharding import Init, Region, Sharding

ALONE = Shares("no_shard", Mesh.serial().alone, Mesh.serial().dp_cp)


def parameter(
    *shape: int, name: str = "p", decay: bool = True, dtype: torch.dtype = torch.float32
) -> nn.Parameter:
    made = nn.Parameter(torch.randn(*shape).to(dtype))
    record = sharding.whole(shape, Init(), decay=decay)
    return sharding.attach(made, Sharding(record.shape, record.regions, Init(), name, decay))


DECAY, NO_DECAY = Group("decay", "adam", True), Group("no_decay", "adam", False)


def by_decay(record: Sharding) -> Group:
    return DECAY if record.decay else NO_DECAY


def test_layout_by_hand() -> None:
    """Groups in order, backwards within a group, aligned to 64, padded for three ranks."""
    items = [
        Item("a", 100, "fp32", DECAY),
        Item("b", 10, "fp32", NO_DECAY),
        Item("c", 64, "fp32", DECAY),
        Item("d", 5, "other", DECAY),
    ]
    plan, other = plan_buffers(items, data_size=3)
    assert [(s.name, s.start, s.stop) for s in plan.slots] == [
        ("c", 0, 64),
        ("a", 64, 164),
        ("b", 192, 202),
    ]
    assert plan.segments == (("decay", (0, 164)), ("no_decay", (192, 202)))
    assert (plan.size, plan.buckets) == (384, ((0, 384),))
    assert plan.shards(0, 1) == [(0, 384)]
    assert [plan.shards(rank, 3) for rank in range(3)] == [[(0, 128)], [(128, 256)], [(256, 384)]]
    assert (other.key, other.size, other.slots[0].index) == ("other", 192, 3)


def test_buckets_are_whole_shares_of_every_rank() -> None:
    items = [Item(str(i), 100, "k", DECAY) for i in range(4)]
    (plan,) = plan_buffers(items, data_size=2, bucket_size=200)
    assert plan.buckets == ((0, 256), (256, 512))
    assert plan.shards(1, 2) == [(128, 256), (384, 512)]


@given(
    sizes=st.lists(st.tuples(st.integers(1, 500), st.booleans()), min_size=1, max_size=12),
    data_size=st.integers(1, 5),
    bucket_size=st.none() | st.integers(1, 900),
)
def test_every_layout_holds_each_parameter_once(
    sizes: list[tuple[int, bool]], data_size: int, bucket_size: int | None
) -> None:
    items = [Item(str(i), n, "k", DECAY if d else NO_DECAY) for i, (n, d) in enumerate(sizes)]
    (plan,) = plan_buffers(items, data_size, bucket_size)
    assert sorted(slot.index for slot in plan.slots) == list(range(len(items)))
    position = 0
    for slot in plan.slots:
        assert slot.start % 64 == 0 and slot.start >= position
        assert slot.stop - slot.start == items[slot.index].numel
        assert plan.group_of(slot) == items[slot.index].group.name
        assert any(start <= slot.start and slot.stop <= stop for start, stop in plan.buckets)
        position = slot.stop
    flat = [edge for bucket in plan.buckets for edge in bucket]
    assert flat[0] == 0 and flat[-1] == plan.size >= position and flat[1:-1:2] == flat[2:-1:2]
    covered = sorted(span for rank in range(data_size) for span in plan.shards(rank, data_size))
    assert merge(covered) == [(0, plan.size)]


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4).flatmap(
        lambda shape: st.tuples(
            st.just(shape),
            st.tuples(*(st.tuples(st.integers(0, n), st.integers(0, n)) for n in shape)),
        )
    )
)
def test_box_ranges_are_the_elements_of_the_box(
    case: tuple[list[int], tuple[tuple[int, int], ...]],
) -> None:
    shape, box = case
    index = torch.arange(math.prod(shape)).view(shape)
    expected = index[sharding.box_slices(box)].flatten().tolist()
    ranges = list(box_ranges(shape, box))
    assert [i for start, stop in ranges for i in range(start, stop)] == expected


def test_parameters_keep_their_values_and_become_views() -> None:
    first, second = parameter(3, 5, name="a"), parameter(7, name="b", decay=False)
    before = first.detach().clone(), second.detach().clone()
    (buffer,) = build_buffers([first, second], torch.float32, group_of=by_decay, shares=ALONE)
    assert torch.equal(first, before[0]) and torch.equal(second, before[1])
    buffer.data.fill_(3.0)
    assert (first == 3).all() and (second == 3).all()
    (first.sum() * 2 + second.sum()).backward()
    assert buffer.grad[:15].tolist() == [2.0] * 15
    assert buffer.grad[64:71].tolist() == [1.0] * 7
    assert buffer.grad.sum() == 37


def test_bf16_gradients_accumulate_in_fp32_in_place() -> None:
    """256 + 1 is lost in bf16; the buffer keeps every microbatch."""
    weight = parameter(4, dtype=torch.bfloat16)
    (buffer,) = build_buffers([weight], torch.float32, group_of=by_decay, shares=ALONE)
    view = weight.grad
    (weight.sum() * 256).backward()
    for _ in range(5):
        weight.sum().backward()
    assert weight.grad is view and view.dtype == torch.float32
    assert buffer.grad[:4].tolist() == [261.0] * 4


def test_zero_grad_puts_the_view_back() -> None:
    weight = parameter(4)
    (buffer,) = build_buffers([weight], torch.float32, group_of=by_decay, shares=ALONE)
    weight.grad = None
    weight.sum().backward()
    with pytest.raises(AssertionError, match="left its buffer"):
        buffer.check_gradients()
    buffer.zero_grad()
    weight.sum().backward()
    buffer.check_gradients()
    assert buffer.grad[:4].tolist() == [1.0] * 4


def test_dtypes_summed_axes_and_ties_part_buffers() -> None:
    plain, coarse = parameter(4), parameter(4, dtype=torch.bfloat16)
    norm = nn.Parameter(torch.ones(4))
    sharding.attach(norm, sharding.whole((4,), Init(), replicated=("tp",), summed=("tp",)))
    tied = nn.Parameter(torch.ones(4))
    record = sharding.whole((4,), Init())
    sharding.attach(tied, Sharding(record.shape, record.regions, Init(), "tied", tied=True))
    buffers = build_buffers(
        [plain, coarse, norm, tied], torch.float32, group_of=by_decay, shares=ALONE
    )
    assert [buffer.summed for buffer in buffers] == [(), (), ("tp",), ()]
    assert [buffer.data.dtype for buffer in buffers].count(torch.bfloat16) == 1


def test_frozen_parameters_stay_outside_and_shared_ones_count_once() -> None:
    frozen, shared = parameter(4), parameter(4)
    frozen.requires_grad_(False)
    model = nn.Module()
    model.a, model.b, model.frozen = shared, shared, frozen
    data_parallel = DataParallel([model, model], Mesh.serial(), torch.float32, group_of=by_decay)
    assert [b.parameters for b in data_parallel.buffers] == [(shared,)]
    assert frozen.grad is None


def second_of_two(axis: str) -> Mesh:
    """Return the mesh of coordinate 1 on an axis of two, without a group."""
    serial = Mesh.serial()
    axes = {**serial.axes, axis: Axis(axis, (0, 1), 1, None)}
    return Mesh(axes, 1, torch.device("cpu"))


def test_only_owned_elements_are_in_the_ranges() -> None:
    """A vocabulary of 5 rows padded to 8, and a bias that coordinate 0 of tp owns."""
    table = nn.Parameter(torch.ones(8, 3))
    region = Region(((0, 5), (0, 3)), ((0, 5), (0, 3)))
    sharding.attach(table, Sharding((5, 3), (region,), Init(), "table"))
    bias = nn.Parameter(torch.ones(10))
    sharding.attach(bias, sharding.whole((10,), Init(), replicated=("tp",)))
    other = parameter(6)
    (buffer,) = build_buffers([other, bias, table], torch.float32, group_of=by_decay, shares=ALONE)
    # Backwards: table at 0, bias at 64, other at 128.
    everything = [(0, 15), (64, 74), (128, 134)]
    assert buffer.owned_ranges(Mesh.serial()) == everything
    assert layout.bridge_gaps(everything, buffer.plan) == [(0, 15), (64, 134)]
    second = [(0, 15), (128, 134)]
    assert buffer.owned_ranges(second_of_two("tp")) == second
    assert layout.bridge_gaps(second, buffer.plan) == second
    replica = Shares("no_shard", Mesh.serial().alone, second_of_two("dp_cp").dp_cp)
    (buffer,) = build_buffers(
        [other, bias, table], torch.float32, group_of=by_decay, shares=replica
    )
    assert buffer.owned_ranges(Mesh.serial()) == []


def test_one_process_moves_no_byte() -> None:
    model = nn.Module()
    model.weight = parameter(4, 4)
    data_parallel = DataParallel([model], Mesh.serial(), torch.float32, group_of=by_decay)
    model.weight.sum().backward()
    with comm.counting() as traffic:
        data_parallel.reduce_gradients()
    assert not traffic.calls
    assert model.weight.grad.sum() == 16


def test_what_nobody_is_summed_with_is_not_rounded() -> None:
    """Nor copied: gradients of a narrower format than they are kept in are made to travel."""
    model = nn.Module()
    model.weight = parameter(4, 4)
    data_parallel = DataParallel(
        [model], Mesh.serial(), torch.float32, group_of=by_decay, reduce_dtype=torch.bfloat16
    )
    model.weight.grad.fill_(1.001)
    with held.counting() as copies:
        data_parallel.reduce_gradients()
    assert copies.most == 0
    assert torch.equal(model.weight.grad, torch.full((4, 4), 1.001))
