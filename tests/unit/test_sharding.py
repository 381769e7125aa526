"""Parameter records: regions cover the logical tensor once, flat ranges become few boxes."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core import sharding
from megatron.core.sharding import Init, box_slices, local_boxes, split, whole


@given(st.data())
def test_a_flat_range_is_at_most_2n_minus_1_boxes(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    total = math.prod(shape)
    start, stop = sorted(data.draw(st.tuples(st.integers(0, total), st.integers(0, total))))
    tensor, seen = torch.arange(total).view(shape), []
    boxes = list(local_boxes(shape, start, stop))
    for box, offset in boxes:
        block = tensor[box_slices(box)].reshape(-1)
        assert block[0] == offset
        seen += block.tolist()
    assert seen == list(range(start, stop))
    assert len(boxes) <= 2 * len(shape) - 1


@pytest.mark.parametrize(("parts", "size", "dim"), [(1, 4, 0), (2, 2, 0), (1, 3, 1), (3, 2, 1)])
def test_shares_of_a_split_tile_the_logical_tensor(parts: int, size: int, dim: int) -> None:
    shape = (12, 6)
    count = torch.zeros(shape)
    for coordinate in range(size):
        for region in split(shape, Init(), dim, coordinate, size, parts=parts).regions:
            count[box_slices(region.logical)] += 1
    assert (count == 1).all()


def test_the_parts_of_a_gated_matrix_are_cut_one_by_one() -> None:
    """Rank 1 of 2 holds the second half of the gate, then the second half of the value."""
    regions = split((8, 3), Init(), 0, 1, 2, parts=2).regions
    assert [(r.local[0], r.logical[0]) for r in regions] == [((0, 2), (2, 4)), ((2, 4), (6, 8))]


def test_owners_are_at_coordinate_zero() -> None:
    record = whole((4,), Init(), replicated=("tp",))
    assert record.owned({"tp": 0, "pp": 3}) == record.regions
    assert record.owned({"tp": 1}) == ()


def test_names_are_module_paths_and_shared_parameters_keep_the_first() -> None:
    model = torch.nn.Module()
    model.first = torch.nn.Linear(2, 2, bias=False)
    sharding.attach(model.first.weight, whole((2, 2), Init()))
    model.second = torch.nn.Module()
    model.second.weight = model.first.weight
    sharding.name_parameters(model)
    assert sharding.of(model.second.weight).name == "first.weight"


def test_a_tied_copy_on_a_later_stage_owns_nothing() -> None:
    record = replace(whole((3, 2), Init(), replicated=("tp",)), tied=True)
    assert record.owned({"pp": 0, "tp": 0}) == record.regions
    assert record.owned({"pp": 1, "tp": 0}) == ()
    assert record.owned({"pp": 0, "tp": 1}) == ()
    assert replace(record, tied=False).owned({"pp": 1, "tp": 0}) == record.regions
