"""A toy model's tensors as any layout holds them, written to checkpoints."""

import math
import random
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.dist_checkpointing import catalog, format, part, plan, publishing, save, staging
from megatron.core.dist_checkpointing.plan import Item
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
    partial = publishing.partial_of(folder, publishing.draw_token())
    publishing.make_partial(partial)
    for rank, items in enumerate(ranks):
        part.write(staging.stage(items), partial, rank)
    return save.publish(partial, folder, len(ranks), facts or {})


def check_filled(ranks: list[list[Item]]) -> None:
    for items in ranks:
        for item in items:
            for piece in item.pieces:
                assert torch.equal(piece.tensor, value(item.key)[box_slices(piece.box)]), item.key


def planned() -> list[list[Item]]:
    return [whole_items(t, 4, saving=True) for t in range(4)]


def two(tmp_path: Path) -> Path:
    """Return a folder with checkpoints 10 and 20, the tracker at 20."""
    for iteration in (10, 20):
        write(tmp_path / catalog.folder_name(iteration), planned(), {"iteration": iteration})
    catalog.write_tracker(tmp_path, 20)
    return tmp_path


def item(name: str, tensor: Tensor) -> Item:
    return plan.of_tensor(name, whole(tensor.shape, INIT), tensor)
