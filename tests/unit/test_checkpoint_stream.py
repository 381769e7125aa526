"""Checkpoints written slab by slab, and what is said of stored values."""

import math
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.core.dist_checkpointing import stream
from megatron.core.dist_checkpointing.boxes import slabs, uncovered, volume
from megatron.core.dist_checkpointing.format import CheckpointError
from megatron.core.dist_checkpointing.reader import Checkpoint
from megatron.core.dist_checkpointing.statistics import difference, statistics
from megatron.core.dist_checkpointing.stream import ReadSlab, Shape, share_out
from megatron.core.sharding import Box, box_slices

VALUES = {
    "rows": torch.arange(35.0).reshape(7, 5),
    "vector": torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64),
    "scalar": torch.tensor(2.5),
    "none": torch.empty(0, 3),
    "cube": torch.arange(36.0).reshape(6, 2, 3).bfloat16(),
    "bytes": torch.arange(20, dtype=torch.uint8),
}
SHAPES = {key: Shape(str(v.dtype)[6:], tuple(v.shape)) for key, v in VALUES.items()}


def read_from(values: dict[str, Tensor]) -> ReadSlab:
    return lambda key, box: values[key][box_slices(box)]


@pytest.mark.parametrize("seed", range(20))
def test_slabs_tile_a_box_in_order_and_keep_the_limit(seed: int) -> None:
    draw = random.Random(seed)
    shape = [draw.randint(1, 6) for _ in range(draw.randint(0, 4))]
    starts = [draw.randint(0, 3) for _ in shape]
    box = tuple((start, start + size) for start, size in zip(starts, shape, strict=True))
    limit = draw.choice((4, 9, 24, 100, 10**6))
    found = list(slabs(box, 4, limit))
    assert all(volume(slab) * 4 <= limit for slab in found)
    whole = torch.arange(math.prod(n + 3 for n in shape)).reshape([n + 3 for n in shape])
    joined = torch.cat([whole[box_slices(slab)].reshape(-1) for slab in found])
    assert torch.equal(joined, whole[box_slices(box)].reshape(-1))


@pytest.mark.parametrize("files", [1, 2, 3, 9])
def test_what_was_streamed_is_read_back(tmp_path: Path, files: int) -> None:
    told: dict[str, int] = {}

    def tell(key: str, size: int) -> None:
        told[key] = told.get(key, 0) + size

    index = stream.write(
        tmp_path / "iter_0000003",
        SHAPES,
        read_from(VALUES),
        {"iteration": 3},
        files=files,
        told=tell,
    )
    assert 1 <= len(index.files) <= files
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000003"]
    assert told == {key: value.nbytes for key, value in VALUES.items() if value.numel()}
    with Checkpoint(tmp_path / "iter_0000003") as checkpoint:
        assert checkpoint.damages() == []
        assert checkpoint.facts["iteration"] == 3
        for key, value in VALUES.items():
            assert torch.equal(checkpoint.read(key), value)


@pytest.mark.parametrize("files", [2, 3, 5])
def test_files_have_even_shares_and_few_boxes(files: int) -> None:
    tensors = {
        "large": Shape("float32", (1000, 16)),
        "small": Shape("float32", (50, 16)),
        "half": Shape("bfloat16", (700, 16)),
    }
    shares = share_out(tensors, files)
    sizes = [sum(volume(box) * tensors[key].itemsize for key, box in share) for share in shares]
    assert max(sizes) - min(sizes) <= files * 64
    for key, tensor in tensors.items():
        boxes = [box for share in shares for name, box in share if name == key]
        assert uncovered(tensor.shape, boxes) is None
        assert len(boxes) <= files
    assert sum(map(len, shares)) <= len(tensors) + files - 1


def test_a_source_that_fails_leaves_nothing_and_the_old_one(tmp_path: Path) -> None:
    final = tmp_path / "iter_0000001"
    stream.write(final, SHAPES, read_from(VALUES), {"iteration": 1})

    def read(key: str, box: Box) -> Tensor:
        raise KeyboardInterrupt if key == "cube" else CheckpointError("gone")

    for order in (SHAPES, dict(reversed(SHAPES.items()))):
        with pytest.raises((CheckpointError, KeyboardInterrupt)):
            stream.write(final, order, read, {})
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000001"]
    with Checkpoint(final) as checkpoint:
        assert checkpoint.damages() == [] and checkpoint.facts["iteration"] == 1


def test_statistics_leave_out_what_is_not_finite() -> None:
    values = torch.tensor([[3.0, -4.0, 0.0], [math.nan, math.inf, -math.inf]])
    found = statistics("x", (2, 3), read_from({"x": values})).to_json()
    assert found == {
        "elements": 6,
        "min": -4.0,
        "max": 3.0,
        "mean": pytest.approx(-1 / 3),
        "norm": 5.0,
        "zeros": 1,
        "nan": 1,
        "inf": 2,
    }
    assert statistics("x", (0,), read_from({"x": torch.empty(0)})).to_json()["min"] is None


def test_statistics_over_many_slabs_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.core.dist_checkpointing.statistics.AT_ONCE", 56)
    values = torch.randn(13, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = statistics("x", (13, 5), read_from({"x": values}))
    assert found.minimum == values.min() and found.maximum == values.max()
    assert found.mean == pytest.approx(values.mean().item())
    assert found.norm == pytest.approx(values.norm().item())


def test_a_difference_has_its_place_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.core.dist_checkpointing.statistics.AT_ONCE", 64)
    left = torch.ones(5, 3, 4, dtype=torch.float64)
    right = left.clone()
    right[3, 1, 2] = 1.25
    right[4, 0, 0] = 3.0
    reads = read_from({"x": left}), read_from({"x": right})
    found = difference("x", (5, 3, 4), *reads)
    assert (found.elements, found.different) == (60, 2)
    assert found.first == (3, 1, 2) and found.first_values == (1.0, 1.25)
    assert found.max_absolute == 2.0 and found.max_relative == pytest.approx(2 / 3)
    assert difference("x", (5, 3, 4), *reads, tolerance=0.21).different == 1
    assert difference("x", (5, 3, 4), *reads, tolerance=2.0).different == 0


@pytest.mark.parametrize(
    ("left", "right", "different"),
    [
        (math.nan, math.nan, 0),
        (math.nan, 1.0, 1),
        (math.inf, math.inf, 0),
        (math.inf, -math.inf, 1),
        (math.inf, 1.0, 1),
        (0.0, 1e-300, 1),
    ],
)
def test_differences_of_values_that_are_no_numbers(
    left: float, right: float, different: int
) -> None:
    values = [{"x": torch.tensor([2.0, value], dtype=torch.float64)} for value in (left, right)]
    for tolerance in (0.0, 1e-310):
        found = difference("x", (2,), *map(read_from, values), tolerance)
        assert found.different == different
        assert (found.max_absolute > 0) == bool(different)


def test_differences_of_other_dtypes() -> None:
    whole = [{"x": torch.tensor([2**60, 2**60 + n])} for n in (0, 1)]
    assert difference("x", (2,), *map(read_from, whole)).different == 1
    halves = [{"x": torch.tensor([1.0, 2.0]).to(d)} for d in (torch.bfloat16, torch.float32)]
    assert difference("x", (2,), *map(read_from, halves)).different == 0
    eighths = [{"x": torch.tensor([1.0, n]).to(torch.float8_e4m3fn)} for n in (2.0, 4.0)]
    assert difference("x", (2,), *map(read_from, eighths)).max_absolute == 2.0
