"""Boxes on disk: any layout writes, any other reads, and nothing half-written is ever taken."""

import json
import math
import os
import random
import resource
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor

from megatron.core.dist_checkpointing import catalog, format, plan, save
from megatron.core.dist_checkpointing.format import CheckpointError
from megatron.core.dist_checkpointing.load import Checkpoint, load
from megatron.core.dist_checkpointing.plan import Item, Piece
from megatron.core.mesh import Mesh
from megatron.core.sharding import Init, Region, Sharding, box_slices, split, whole

WORLD = Mesh.serial().world
INIT = Init()


def cut(size: int, part: int, parts: int) -> tuple[int, int]:
    """Return an uneven share of ``size``."""
    return size * part // parts, size * (part + 1) // parts


# A toy model: logical tensors of known values, and how rank t of tp holds each.

LOGICAL = {
    "gated": (48, 5),
    "fused": (40, 3),
    "rows": (4, 24),
    "norm": (7,),
    "vocabulary": (21, 3),
    "cube": (6, 5, 4),
    "scalar": (),
}


def value(name: str, dtype: torch.dtype = torch.float64) -> Tensor:
    shape = LOGICAL[name]
    first = 1000 * list(LOGICAL).index(name)
    return torch.arange(first, first + math.prod(shape)).to(dtype).reshape(shape)


def vocabulary_record(coordinate: int, size: int) -> tuple[Sharding, tuple[int, ...]]:
    """21 rows, padded to a multiple of ``size``, cut evenly: late ranks hold padding only."""
    share = math.ceil(21 / size)
    first, last = coordinate * share, min((coordinate + 1) * share, 21)
    regions = ()
    if first < last:
        regions = (Region(((0, last - first), (0, 3)), ((first, last), (0, 3))),)
    return Sharding((21, 3), regions, INIT), (share, 3)


def fused_record(coordinate: int, size: int) -> tuple[Sharding, tuple[int, ...]]:
    """32 query rows cut over all ranks, then 8 key rows of which pairs of ranks hold one share."""
    first, last = cut(32, coordinate, size)
    replicas = 2 if size % 2 == 0 else 1
    low, high = cut(8, coordinate // replicas, size // replicas)
    queries, keys = last - first, high - low
    regions = (
        Region(((0, queries), (0, 3)), ((first, last), (0, 3))),
        Region(((queries, queries + keys), (0, 3)), ((32 + low, 32 + high), (0, 3)), ("replica",)),
    )
    return Sharding((40, 3), regions, INIT), (queries + keys, 3)


def records(coordinate: int, size: int) -> dict[str, tuple[Sharding, tuple[int, ...]]]:
    """Return the record and local shape of every tensor on one tensor-parallel rank."""
    found = {
        "gated": (
            split((48, 5), INIT, 0, coordinate, size, parts=2),
            (48 // size, 5),
        ),
        "fused": fused_record(coordinate, size),
        "rows": (split((4, 24), INIT, 1, coordinate, size), (4, 24 // size)),
        "norm": (whole((7,), INIT, replicated=("tp",)), (7,)),
        "vocabulary": vocabulary_record(coordinate, size),
        "cube": (whole((6, 5, 4), INIT, replicated=("tp",)), (6, 5, 4)),
        "scalar": (whole((), INIT, replicated=("tp",)), ()),
    }
    return {name: (replace(record, name=name), shape) for name, (record, shape) in found.items()}


def coordinates(coordinate: int, size: int) -> dict[str, int]:
    return {"tp": coordinate, "replica": coordinate % 2 if size % 2 == 0 else 0}


def local(name: str, record: Sharding, shape: tuple[int, ...]) -> Tensor:
    """Return what a rank holds: the logical values in its regions, -1 in padding."""
    out = torch.full(shape, -1.0, dtype=torch.float64)
    for region in record.regions:
        out[box_slices(region.local)] = value(name)[box_slices(region.logical)]
    return out


def ranges(total: int, parts: int, draw: random.Random) -> list[tuple[int, int]]:
    """Return uneven ranges that tile [0, total)."""
    inner = sorted(draw.randint(0, total) for _ in range(parts - 1))
    return list(zip([0, *inner], [*inner, total], strict=True))


def whole_items(t: int, tp: int, *, saving: bool, fill: float | None = None) -> list[Item]:
    made = []
    for name, (record, shape) in records(t, tp).items():
        tensor = local(name, record, shape)
        if fill is not None:
            tensor.fill_(fill)
        where = coordinates(t, tp) if saving else None
        made.append(plan.of_tensor(name, record, tensor, coordinates=where))
    return made


def flat_items(
    t: int, tp: int, start: int, stop: int, *, saving: bool, fill: float | None = None
) -> list[Item]:
    """Return the items of [start, stop) of a buffer that holds all local tensors end to end."""
    made, base = [], 0
    for name, (record, shape) in records(t, tp).items():
        size = math.prod(shape)
        first, last = max(start - base, 0), min(stop - base, size)
        base += size
        data = local(name, record, shape).reshape(-1)[first : max(last, first)].clone()
        if fill is not None:
            data.fill_(fill)
        where = coordinates(t, tp) if saving else None
        if data.numel():
            made.append(plan.of_flat(name, record, shape, first, data, coordinates=where))
    return made


def buffer_size(t: int, tp: int) -> int:
    return sum(math.prod(shape) for _, shape in records(t, tp).values())


def write(folder: Path, ranks: list[list[Item]], facts: dict | None = None) -> format.Index:
    """Write as so many ranks, one after the other, and publish as ``folder``."""
    partial = folder.with_name(folder.name + save.PARTIAL)
    partial.mkdir(parents=True)
    for rank, items in enumerate(ranks):
        save.write(save.stage(items), partial, rank)
    return save.publish(partial, folder, len(ranks), facts or {})


def check_filled(ranks: list[list[Item]]) -> None:
    for items in ranks:
        for item in items:
            for piece in item.pieces:
                assert torch.equal(piece.tensor, value(item.key)[box_slices(piece.box)]), item.key


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


def planned() -> list[list[Item]]:
    return [whole_items(t, 4, saving=True) for t in range(4)]


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
    problem = plan.uncovered(shape, boxes)
    assert (problem is None) == bool((count == 1).all())
    if problem is not None and "overlap" in problem:
        assert count.max() > 1


# Damage


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def two(tmp_path: Path) -> Path:
    """Return a folder with checkpoints 10 and 20, the tracker at 20."""
    for iteration in (10, 20):
        write(tmp_path / catalog.folder_name(iteration), planned(), {"iteration": iteration})
    catalog.write_tracker(tmp_path, 20)
    return tmp_path


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
        with pytest.raises(CheckpointError, match="1 tensor.s. damaged:\n  fused"):
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


def item(name: str, tensor: Tensor) -> Item:
    return plan.of_tensor(name, whole(tensor.shape, INIT), tensor)


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


# The catalog


def test_the_tracker_set_back_by_hand_is_obeyed(tmp_path: Path) -> None:
    root = two(tmp_path)
    catalog.write_tracker(root, 10)
    assert catalog.newest(catalog.scan(root)).name == 10


def test_a_save_after_going_back_is_the_newest_though_its_number_is_lower(tmp_path: Path) -> None:
    root = two(tmp_path)
    write(root / catalog.folder_name(15), planned(), {"iteration": 15})
    catalog.write_tracker(root, 15)
    assert catalog.newest(catalog.scan(root)).name == 15


def test_a_checkpoint_published_before_the_tracker_moved_is_the_newest(tmp_path: Path) -> None:
    root = two(tmp_path)
    write(root / catalog.folder_name(30), planned(), {"iteration": 30})
    later = time.time() + 100
    os.utime(root / catalog.folder_name(30) / format.INDEX, (later, later))
    assert catalog.newest(catalog.scan(root)).name == 30


def test_an_older_checkpoint_whose_files_were_touched_is_not_newer(tmp_path: Path) -> None:
    root = two(tmp_path)
    write(root / catalog.folder_name(15), planned(), {"iteration": 15})
    catalog.write_tracker(root, 15)
    later = time.time() + 100
    os.utime(root / "iter_0000020" / format.INDEX, (later, later))
    assert catalog.newest(catalog.scan(root)).name == 15


def test_a_tracker_that_names_a_missing_folder_is_reported(tmp_path: Path) -> None:
    root = two(tmp_path)
    catalog.write_tracker(root, 99)
    held = catalog.scan(root)
    assert catalog.newest(held).name == 20
    assert "does not exist" in held.ignored[root / "iter_0000099"]


def test_a_stop_between_the_two_renames_of_a_rewrite_loses_nothing(tmp_path: Path) -> None:
    root = two(tmp_path)
    folder = root / catalog.folder_name(20)
    os.rename(folder, folder.with_name(folder.name + save.REPLACED))
    assert catalog.newest(catalog.scan(root)).name == 20


def test_saving_an_iteration_again_replaces_it(tmp_path: Path) -> None:
    target = torch.zeros(4)
    for number in (1.0, 2.0):
        target.fill_(number)
        save.save([item("a", target)], tmp_path / "iter_0000001", {}, WORLD)
    with Checkpoint(tmp_path / "iter_0000001") as checkpoint:
        assert checkpoint.read("a").tolist() == [2.0] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000001"]


def test_a_rewrite_that_cannot_be_published_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = tmp_path / "iter_0000001"
    save.save([item("a", torch.ones(4))], final, {}, WORLD)
    rename, moves = os.rename, []

    def stubborn(source: Path, target: Path) -> None:
        moves.append(target)
        if str(source).endswith(save.PARTIAL):
            # Even now the old one is there under a name that a start-up looks for.
            assert [found.name for found in catalog.scan(tmp_path).complete] == [1]
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(save.os, "rename", stubborn)
    with pytest.raises(save.SaveError, match="Input/output error"):
        save.save([item("a", torch.zeros(4))], final, {}, WORLD)
    assert len(moves) == 3 and [path.name for path in tmp_path.iterdir()] == [final.name]
    with Checkpoint(final) as checkpoint:
        assert checkpoint.read("a").tolist() == [1.0] * 4


@pytest.mark.parametrize("text", ["", "ten", "1\n2", "-3"])
def test_a_tracker_that_is_no_number_is_an_error_that_shows_it(tmp_path: Path, text: str) -> None:
    (tmp_path / catalog.TRACKER).write_text(text)
    with pytest.raises(CheckpointError, match=catalog.TRACKER):
        catalog.read_tracker(tmp_path)
    assert not catalog.scan(tmp_path).is_empty


# CKPT-20: retention


def saved(root: Path, *iterations: int) -> None:
    for iteration in iterations:
        save.save([item("a", torch.zeros(3))], root / catalog.folder_name(iteration), {}, WORLD)
        catalog.write_tracker(root, iteration)


def names(root: Path) -> list[int]:
    return sorted(int(p.name[5:]) for p in root.iterdir() if p.is_dir())


def test_ckpt_20_two_of_five_remain_and_the_tracker_is_valid(tmp_path: Path) -> None:
    for iteration in (1, 2, 3, 4, 5):
        saved(tmp_path, iteration)
        catalog.prune(tmp_path, 2, None)
    assert names(tmp_path) == [4, 5]
    assert catalog.newest(catalog.scan(tmp_path)).name == 5


def test_ckpt_20_multiples_pins_and_incomplete_ones_are_kept(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, 4, 5, 6)
    (tmp_path / "iter_0000001" / catalog.PIN).touch()
    (tmp_path / "iter_0000002" / "rank00000.bin").unlink()
    removed = catalog.prune(tmp_path, 1, 4)
    assert [path.name for path in removed] == ["iter_0000003", "iter_0000005"]
    assert names(tmp_path) == [1, 2, 4, 6]


def test_ckpt_20_what_lies_beyond_the_tracker_is_left_alone(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20, 30)
    saved(tmp_path, 15)
    catalog.prune(tmp_path, 1, None)
    assert names(tmp_path) == [15, 20, 30]


def test_ckpt_20_a_stop_while_removing_is_cleared_later(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    os.rename(tmp_path / "iter_0000001", tmp_path / f"iter_0000001{catalog.DELETED}")
    held = catalog.scan(tmp_path)
    assert [found.name for found in held.complete] == [2] and held.ignored == {}
    (tmp_path / f".{catalog.TRACKER}.abc").touch()
    catalog.clear(tmp_path)
    assert names(tmp_path) == [2] and len(list(tmp_path.iterdir())) == 2


# CKPT-21, CKPT-22 and kills


def test_ckpt_21_a_full_disk_leaves_the_older_checkpoint_and_no_rubbish(tmp_path: Path) -> None:
    """A file-size limit below the checkpoint's size stands for the full disk."""
    saved(tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
    try:
        with pytest.raises(save.SaveError, match="File too large"):
            save.save([item("a", torch.zeros(2**20))], tmp_path / "iter_0000002", {}, WORLD)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(tmp_path) == [1]
    with Checkpoint(catalog.newest(catalog.scan(tmp_path)).folder) as checkpoint:
        assert checkpoint.damages() == []
    save.save([item("a", torch.zeros(2**20))], tmp_path / "iter_0000002", {}, WORLD)


def test_ckpt_21_too_little_space_is_seen_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 1)
    monkeypatch.setattr(save.shutil, "disk_usage", lambda path: type("", (), {"free": 1000})())
    monkeypatch.setattr(save, "write", lambda *args: pytest.fail("nothing may be written"))
    with pytest.raises(save.SaveError, match=r"1000 B free, a checkpoint takes 4.00 KiB"):
        save.save([item("a", torch.zeros(1024))], tmp_path / "iter_0000002", {}, WORLD)
    assert names(tmp_path) == [1]


def test_ckpt_22_twenty_saves_keep_resident_memory_bounded(tmp_path: Path) -> None:
    """Half of the state is not contiguous, so that it must be copied on its way."""
    state = torch.randint(0, 99, (4096, 2 * 2048), dtype=torch.int32)  # 64 MB
    items = [item("plain", state[:2048]), item("strided", state[2048:, ::2])]
    process, resident = psutil.Process(), []
    for number in range(20):
        save.save(items, tmp_path / f"iter_{number % 2}", {}, WORLD)
        resident.append(process.memory_info().rss)
    assert resident[-1] < 1.15 * resident[2]
    # Two chunks are alive while the next is copied; the state itself never is.
    assert max(resident) < resident[0] + 3 * format.CHUNK


def _saves_until_killed(root: Path, report: int) -> None:
    torch.set_num_threads(1)  # a forked process has no pool of threads, and would wait for one
    tensor = torch.zeros(300_000, dtype=torch.int32)
    first = (catalog.read_tracker(root) or 0) + 1
    for iteration in range(first, first + 10_000):
        tensor.fill_(iteration)
        catalog.clear(root)
        final = root / catalog.folder_name(iteration)
        save.save([item("a", tensor), item("b", tensor[::3])], final, {}, WORLD)
        catalog.write_tracker(root, iteration)
        os.write(report, iteration.to_bytes(8, "little"))
        catalog.prune(root, 2, None)


@pytest.mark.parametrize("kills", [8, pytest.param(400, marks=pytest.mark.slow)])
def test_kills_at_random_moments_never_lose_or_forge_a_checkpoint(
    tmp_path: Path, kills: int
) -> None:
    """The newest complete one is whole and no older than what was last said to be saved."""
    draw, acknowledged = random.Random(5), 0
    for _ in range(kills):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                _saves_until_killed(tmp_path, writing)
            finally:
                os._exit(1)
        os.close(writing)
        os.read(reading, 8)  # one save at least, so that each round kills at another place
        time.sleep(draw.uniform(0, 0.15))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        while block := os.read(reading, 8):
            acknowledged = int.from_bytes(block, "little")
        os.close(reading)
        found = catalog.newest(catalog.scan(tmp_path))
        assert found is not None and found.name >= acknowledged
        with Checkpoint(found.folder) as checkpoint:
            assert checkpoint.damages() == []
            assert (checkpoint.read("a") == found.name).all()
            assert (checkpoint.read("b") == found.name).all()
