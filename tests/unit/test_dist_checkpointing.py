"""Boxes on disk: any layout writes, any other reads, and nothing incomplete or damaged is taken."""

import json
import math
import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.core.dist_checkpointing import catalog, format, plan
from megatron.core.dist_checkpointing.boxes import uncovered
from megatron.core.dist_checkpointing.format import CheckpointError
from megatron.core.dist_checkpointing.load import load
from megatron.core.dist_checkpointing.plan import Piece
from megatron.core.dist_checkpointing.reader import Checkpoint
from megatron.core.sharding import Region, Sharding, box_slices, whole
from tests.unit.checkpoint_files import (
    INIT,
    LOGICAL,
    WORLD,
    buffer_size,
    check_filled,
    flat_items,
    item,
    planned,
    ranges,
    two,
    value,
    whole_items,
    write,
)


def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path) -> None:
    """Bytes, not values: NaNs with a payload and negative zeros too."""
    generator = np.random.default_rng(1)
    made, items = {}, []
    for name, dtype in format.DTYPES.items():
        data = torch.from_numpy(generator.integers(0, 256, 37 * 5 * 8, dtype=np.uint8))
        data = data % 2 if dtype == torch.bool else data
        made[name] = data.view(dtype).reshape(-1, 5).t()[1:, ::2]
        record = whole(made[name].shape, INIT)
        items.append(plan.of_tensor(name, record, made[name]))
    assert not made["float32"].is_contiguous()
    write(tmp_path / "one", [items])
    with Checkpoint(tmp_path / "one") as checkpoint:
        for name, tensor in made.items():
            back = checkpoint.read(name)
            assert back.dtype == tensor.dtype
            assert torch.equal(
                back.contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)
            )


def test_the_hash_is_of_the_content_alone(tmp_path: Path) -> None:
    """Neither facts, nor times, nor which rank wrote a box; but every element and every name."""
    ranks = [whole_items(t, 4, saving=True) for t in range(4)]
    index = write(tmp_path / "one", ranks, {"iteration": 1})
    assert format.read_index(tmp_path / "one").hash == index.hash != ""
    assert write(tmp_path / "two", ranks[::-1], {"iteration": 2}).hash == index.hash
    shape = (4, 2)
    hashes = {
        write(tmp_path / f"{key}{dtype}{last}", [[item(key, data)]]).hash
        for key in ("a", "b")
        for dtype in (torch.float32, torch.int32)
        for last in (0, 1)
        for data in [torch.tensor([0] * 7 + [last], dtype=dtype).view(shape)]
    }
    hashes.add(write(tmp_path / "flat", [[item("a", torch.zeros(8))]]).hash)
    assert len(hashes) == 9


@pytest.mark.parametrize("read_tp", [1, 3, 8])
def test_four_ranks_write_and_any_number_reads(tmp_path: Path, read_tp: int) -> None:
    write(tmp_path / "one", [whole_items(t, 4, saving=True) for t in range(4)])
    with Checkpoint(tmp_path / "one") as checkpoint:
        for name in LOGICAL:
            assert torch.equal(checkpoint.read(name), value(name))
        ranks = [whole_items(t, read_tp, saving=False, fill=-7.0) for t in range(read_tp)]
        for items in ranks:
            load(items, checkpoint, WORLD)
    check_filled(ranks)


def test_each_byte_is_written_once(tmp_path: Path) -> None:
    """Replicated rows, norms and padding add nothing: the file holds the logical elements."""
    index = write(tmp_path / "one", [whole_items(t, 4, saving=True) for t in range(4)])
    stored = sum(tensor.bytes_of(box) for tensor in index.tensors.values() for box in tensor.boxes)
    assert stored == 8 * sum(math.prod(shape) for shape in LOGICAL.values())


@pytest.mark.parametrize("seed", range(12))
def test_flat_shards_of_any_layout_fill_any_other(tmp_path: Path, seed: int) -> None:
    """Uneven shards of flat buffers: tensor x data parallel A writes, B reads, all elements."""
    draw = random.Random(seed)
    tp, dp = draw.choice([1, 2, 4]), draw.randint(1, 4)
    ranks = []
    for t in range(tp):
        for start, stop in ranges(buffer_size(t, tp), dp, draw):
            ranks.append(flat_items(t, tp, start, stop, saving=True))
    write(tmp_path / "one", ranks)
    tp, dp = draw.choice([1, 3, 8]), draw.randint(1, 5)
    with Checkpoint(tmp_path / "one") as checkpoint:
        filled = []
        for t in range(tp):
            for start, stop in ranges(buffer_size(t, tp), dp, draw):
                items = flat_items(t, tp, start, stop, saving=False, fill=-7.0)
                load(items, checkpoint, WORLD, strictness="assume_ok_unexpected")
                filled.append(items)
    check_filled(filled)
    rows = sum(piece.tensor.numel() for items in filled for i in items for piece in i.pieces)
    assert rows >= sum(math.prod(shape) for shape in LOGICAL.values())


def test_ckpt_08_a_padded_vocabulary_is_padded_anew(tmp_path: Path) -> None:
    """21 rows stored from 24 padded ones fill a table of 128, whose padding is left alone."""
    write(tmp_path / "one", [whole_items(t, 4, saving=True) for t in range(4)])
    table = torch.full((128, 3), -7.0, dtype=torch.float64)
    box = ((0, 21), (0, 3))
    record = Sharding((21, 3), (Region(box, box),), INIT)
    with Checkpoint(tmp_path / "one") as checkpoint:
        items = [plan.of_tensor("vocabulary", record, table)]
        load(items, checkpoint, WORLD, strictness="assume_ok_unexpected")
    assert torch.equal(table[:21], value("vocabulary"))
    assert (table[21:] == -7).all()


@pytest.mark.parametrize("replicas", [1, 2, 3, 7])
def test_replicas_share_the_work_evenly(tmp_path: Path, replicas: int) -> None:
    """Each replica writes its share of the bytes of each dtype, to one element."""
    everything = whole_items(0, 1, saving=True)
    half = [replace(item, key=f"half.{item.key}") for item in everything]
    half = [
        replace(
            item,
            dtype=torch.bfloat16,
            pieces=tuple(Piece(p.box, p.tensor.bfloat16()) for p in item.pieces),
        )
        for item in half
    ]
    shares = [plan.spread([*half, *everything], r, replicas) for r in range(replicas)]
    for dtype in (torch.bfloat16, torch.float64):
        sizes = [
            sum(p.tensor.numel() for item in share if item.dtype == dtype for p in item.pieces)
            for share in shares
        ]
        assert max(sizes) - min(sizes) <= 1
    write(tmp_path / "one", shares)
    with Checkpoint(tmp_path / "one") as checkpoint:
        for name in LOGICAL:
            assert torch.equal(checkpoint.read(name), value(name))


def test_a_tied_tensor_belongs_to_the_first_stage() -> None:
    record = replace(whole((4,), INIT), tied=True)
    tensor = torch.zeros(4)
    assert len(plan.of_tensor("w", record, tensor, coordinates={"pp": 0}).pieces) == 1
    assert plan.of_tensor("w", record, tensor, coordinates={"pp": 3}).pieces == ()
    assert len(plan.of_tensor("w", record, tensor).pieces) == 1


# CKPT-23: completeness


def test_ckpt_23_a_dropped_shard_is_detected(tmp_path: Path) -> None:
    ranks = planned()
    ranks[2] = [replace(i, pieces=i.pieces[:1]) if i.key == "gated" else i for i in ranks[2]]
    with pytest.raises(CheckpointError, match=r"gated .*30 of 240 elements are in no box"):
        write(tmp_path / "one", ranks)
    assert not (tmp_path / "one").exists()


def test_ckpt_23_a_tensor_that_nobody_holds_is_detected(tmp_path: Path) -> None:
    ranks = [[replace(i, pieces=()) if i.key == "norm" else i for i in r] for r in planned()]
    with pytest.raises(CheckpointError, match="norm .*7 of 7"):
        write(tmp_path / "one", ranks)


def test_ckpt_23_a_doubled_shard_is_detected(tmp_path: Path) -> None:
    ranks = planned()
    doubled = next(item for item in ranks[1] if item.key == "rows")
    with pytest.raises(CheckpointError, match="rows .*overlap"):
        write(tmp_path / "one", [*ranks, [doubled]])


def test_ckpt_23_one_dropped_and_one_doubled_do_not_cancel(tmp_path: Path) -> None:
    ranks = planned()
    ranks[2] = [item for item in ranks[2] if item.key != "rows"]
    ranks[3] += [item for item in ranks[1] if item.key == "rows"]
    with pytest.raises(CheckpointError, match="rows .*overlap"):
        write(tmp_path / "one", ranks)


def test_ckpt_23_ranks_that_disagree_about_a_shape_are_detected(tmp_path: Path) -> None:
    ranks = planned()
    ranks[1] = [replace(i, shape=(8,)) if i.key == "norm" else i for i in ranks[1]]
    with pytest.raises(CheckpointError, match="disagree about norm"):
        write(tmp_path / "one", ranks)


@pytest.mark.parametrize("seed", range(40))
def test_ckpt_23_coverage_equals_counting(seed: int) -> None:
    """Against an array that counts how often each element is held."""
    draw = random.Random(seed)
    shape = tuple(draw.randint(1, 4) for _ in range(draw.randint(1, 3)))
    boxes = [tuple((0, size) for size in shape)]
    for _ in range(draw.randint(0, 6)):  # split boxes, so that many draws tile exactly
        box = boxes.pop(draw.randrange(len(boxes)))
        dim = draw.randrange(len(shape))
        middle = draw.randint(*box[dim])
        for part in ((box[dim][0], middle), (middle, box[dim][1])):
            boxes.append((*box[:dim], part, *box[dim + 1 :]))
    for _ in range(draw.choice([0, 0, 1])):
        boxes.append(tuple(sorted(draw.sample(range(size + 1), 2)) for size in shape))
        boxes[-1] = tuple(tuple(pair) for pair in boxes[-1])
    if draw.random() < 0.3:
        boxes.pop(draw.randrange(len(boxes)))
    count = np.zeros(shape, int)
    for box in boxes:
        count[box_slices(box)] += 1
    problem = uncovered(shape, boxes)
    assert (problem is None) == bool((count == 1).all())
    if problem is not None and "overlap" in problem:
        assert count.max() > 1


# Damage


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_one_flipped_bit_is_found_and_named(tmp_path: Path) -> None:
    root = two(tmp_path)
    data = root / "iter_0000020" / "rank00000.bin"
    index = format.read_index(root / "iter_0000020")
    box = next(b for b in index.tensors["fused"].boxes if b.file == data.name)
    flip(data, box.offset + 5)
    with Checkpoint(root / "iter_0000020") as checkpoint:
        problems = checkpoint.damages()
        assert len(problems) == 1 and problems[0].startswith("fused: rank00000.bin from byte")
        items = whole_items(0, 1, saving=False, fill=-7.0)
        with pytest.raises(CheckpointError, match=r"is damaged: .*\n  fused: rank00000.bin"):
            load(items, checkpoint, WORLD, verify=True)
        assert all((p.tensor == -7).all() for item in items for p in item.pieces)
    with Checkpoint(root / "iter_0000010") as checkpoint:
        assert checkpoint.damages() == []


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda f: os.truncate(f / "rank00001.bin", 64), "has 64 bytes instead of"),
        (lambda f: (f / "rank00003.bin").unlink(), "rank00003.bin is missing"),
        (lambda f: os.truncate(f / format.INDEX, 300), "not valid JSON"),
        (lambda f: (f / format.INDEX).unlink(), "has no checkpoint.json"),
        (lambda f: (f / format.INDEX).write_bytes(b"\xff\xfe\x00"), "cannot be read"),
        (lambda f: (f / format.INDEX).write_text("{}"), "not the index of a checkpoint"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path: Path, harm, reason) -> None:
    root = two(tmp_path)
    harm(root / "iter_0000020")
    held = catalog.scan(root)
    assert catalog.newest(held).name == 10
    assert reason in held.ignored[root / "iter_0000020"]


def test_an_edited_index_is_not_trusted(tmp_path: Path) -> None:
    root = two(tmp_path)
    path = root / "iter_0000020" / format.INDEX
    path.write_text(path.read_text().replace('"iteration": 20', '"iteration": 21'))
    with pytest.raises(CheckpointError, match="changed or damaged"):
        format.read_index(path.parent)


def test_a_newer_format_version_is_refused_with_both_numbers(tmp_path: Path) -> None:
    root = two(tmp_path)
    path = root / "iter_0000020" / format.INDEX
    path.write_text(path.read_text().replace('"version":1', '"version":9'))
    with pytest.raises(CheckpointError, match=r"format version 9, this program reads 1"):
        format.read_index(path.parent)


def test_the_index_is_plain_json_and_nothing_is_a_pickle(tmp_path: Path) -> None:
    root = two(tmp_path)
    folder = root / "iter_0000020"
    index = json.loads((folder / format.INDEX).read_text())
    assert index["facts"]["iteration"] == 20
    assert index["tensors"]["norm"]["shape"] == [7]
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoint.json",
        *(f"rank0000{rank}.bin" for rank in range(4)),
    ]
    # Raw bytes: numpy reads a tensor from its offset without any of our code.
    file, offset, _, extent = index["tensors"]["norm"]["boxes"][0]
    assert extent == [[0, 7]]
    raw = np.fromfile(folder / file, "<f8", 7, offset=offset)
    assert raw.tolist() == value("norm").tolist()


# Strictness


def test_ckpt_12_a_missing_tensor_is_fatal_and_named(tmp_path: Path) -> None:
    write(tmp_path / "one", [[item("a", torch.zeros(2))]])
    mine = [item("a", torch.full((2,), 5.0)), item("b", torch.full((3,), 5.0))]
    with Checkpoint(tmp_path / "one") as checkpoint:
        with pytest.raises(CheckpointError, match="1 tensor.s. missing:\n  b"):
            load(mine, checkpoint, WORLD)
        assert (mine[0].pieces[0].tensor == 5).all()
        report = load(mine, checkpoint, WORLD, strictness="log_all")
    assert report.missing == ["b"] and (mine[1].pieces[0].tensor == 5).all()
    assert (mine[0].pieces[0].tensor == 0).all()


def test_ckpt_13_a_stray_tensor_is_fatal_or_named(tmp_path: Path) -> None:
    write(tmp_path / "one", [[item("a", torch.zeros(2)), item("stray", torch.zeros(3))]])
    with Checkpoint(tmp_path / "one") as checkpoint:
        for strict in ("raise_all", "raise_unexpected"):
            with pytest.raises(CheckpointError, match="1 tensor.s. unexpected:\n  stray"):
                load([item("a", torch.ones(2))], checkpoint, WORLD, strictness=strict)
        report = load([item("a", torch.ones(2))], checkpoint, WORLD, strictness="log_unexpected")
        assert report.unexpected == ["stray"]
        report = load([item("a", torch.ones(2))], checkpoint, WORLD, set_aside=("str",))
        assert report.unexpected == []


@pytest.mark.parametrize("strictness", ["raise_all", "ignore_all"])
def test_another_shape_or_kind_is_refused_under_any_strictness(tmp_path: Path, strictness) -> None:
    write(tmp_path / "one", [[item("a", torch.zeros(2)), item("n", torch.zeros(2).long())]])
    mine = [item("a", torch.ones(3)), item("n", torch.ones(2))]
    with (
        Checkpoint(tmp_path / "one") as checkpoint,
        pytest.raises(CheckpointError) as error,
    ):
        load(mine, checkpoint, WORLD, strictness=strictness)
    assert "a: float32 [2], here float32 [3]" in str(error.value)
    assert "n: int64 [2], here float32 [2]" in str(error.value)


def test_floating_point_is_converted_and_reported(tmp_path: Path) -> None:
    stored = torch.tensor([1.0, 1.00390625, 3.0])
    write(tmp_path / "one", [[item("a", stored)]])
    with Checkpoint(tmp_path / "one") as checkpoint:
        for dtype, expected in (
            (torch.float64, [1.0, 1.00390625, 3.0]),
            (torch.bfloat16, [1.0, 1.0, 3.0]),
        ):
            target = torch.zeros(3, dtype=dtype)
            report = load([item("a", target)], checkpoint, WORLD)
            assert target.tolist() == expected
            assert report.converted == {("float32", str(dtype)[6:]): ["a"]}


def test_parts_of_wide_and_narrow_rows_are_read_right(tmp_path: Path) -> None:
    """Rows above and below the size at which the reader looks into each row."""
    draw = torch.Generator().manual_seed(3)
    for name, shape in {"wide": (3, 2, 700_000), "narrow": (5000, 40, 3)}.items():
        tensor = torch.randint(0, 99, shape, dtype=torch.int32, generator=draw)
        write(tmp_path / name, [[item("t", tensor)]])
        with Checkpoint(tmp_path / name) as checkpoint:
            for box in (
                ((1, 3), (0, 2), (0, shape[2])),
                ((0, 3), (1, 2), (1, shape[2] - 1)),
                ((2, 3), (0, 1), (0, 2)),
                tuple((0, size) for size in shape),
            ):
                assert torch.equal(checkpoint.read("t", box), tensor[box_slices(box)])
                target = torch.zeros(tensor.shape, dtype=torch.int32)[box_slices(box)]
                checkpoint.fill("t", Piece(box, target))
                assert torch.equal(target, tensor[box_slices(box)])
