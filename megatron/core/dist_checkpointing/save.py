"""Saving: stage, write, publish, each a function of its own.

`stage` lists what this rank writes (and copies it when training is to go on meanwhile); `write`
puts it into a folder beside the checkpoint's and leaves a done-mark, the rank's part of the index;
`publish`, on rank 0 alone, joins the parts, checks that every element of every tensor is there
exactly once, and renames the folder. None of the three communicates, so `write` may run in the
background; `save` is the three in a row for all ranks. Until the rename, older checkpoints are not
touched and nothing looks like a new one; when a step fails on any rank, all raise `SaveError` and
the folder goes.

A part is written in one pass: a helper thread computes checksums beside the writes, and only what
is not contiguous or not in host memory is copied, a chunk at a time.
"""

import math
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core import comm
from megatron.core.dist_checkpointing.format import (
    ALIGNMENT,
    CHUNK,
    INDEX,
    CheckpointError,
    Index,
    StoredBox,
    StoredTensor,
    dtype_name,
    parse_index,
    sync_folder,
    write_index,
)
from megatron.core.dist_checkpointing.plan import Item, Piece, uncovered
from megatron.core.mesh import Axis
from megatron.core.utils import human_bytes, round_up

PARTIAL = ".partial"
"""Ending of the folder that a save writes into; one that stays behind is no checkpoint."""
REPLACED = ".replaced"
"""Ending of an older checkpoint of the same name, for the moment between two renames."""


class SaveError(Exception):
    """A checkpoint was not written; the older ones are as they were."""


@dataclass(frozen=True)
class Staged:
    """What one rank writes."""

    items: list[Item]

    @property
    def bytes(self) -> int:
        """Return the size of the file it makes."""
        return sum(
            round_up(piece.tensor.nbytes, ALIGNMENT) for item in self.items for piece in item.pieces
        )


def stage(items: Iterable[Item], *, copy: bool = False) -> Staged:
    """Return what to write, as views, or as copies in host memory that training cannot change."""
    items = list(items)
    if copy:
        items = [
            replace(item, pieces=tuple(_copied(piece) for piece in item.pieces)) for item in items
        ]
    return Staged(items)


def _copied(piece: Piece) -> Piece:
    return Piece(piece.box, piece.tensor.to("cpu", copy=True))


def write(staged: Staged, folder: Path, rank: int) -> Index:
    """Write one rank's boxes and then its done-mark into ``folder``; both are on disk on return.

    Raises:
        OSError: the disk is full, or another failure of the file system.
    """
    index = Index()
    # A key of which this rank holds nothing is listed too: somebody must hold it.
    for item in staged.items:
        index.tensors[item.key] = StoredTensor(dtype_name(item.dtype), item.shape)
    if any(item.pieces for item in staged.items):
        name = f"rank{rank:05d}.bin"
        with open(folder / name, "wb", buffering=0) as file, ThreadPoolExecutor(1) as helper:
            offset = 0
            for item in staged.items:
                for piece in item.pieces:
                    crc = _write_tensor(file.fileno(), piece.tensor, helper)
                    stored = StoredBox(piece.box, name, offset, crc)
                    index.tensors[item.key].boxes.append(stored)
                    offset += round_up(piece.tensor.nbytes, ALIGNMENT)
            os.fsync(file.fileno())
        index.files[name] = offset
    write_index(index, folder / mark(rank))
    return index


def mark(rank: int) -> str:
    """Return the name of a rank's done-mark."""
    return f"rank{rank:05d}.done"


def _write_tensor(descriptor: int, tensor: Tensor, helper: ThreadPoolExecutor) -> int:
    """Write the bytes of ``tensor`` and the padding after them; return the checksum."""
    crc = 0
    for chunk in _chunks(tensor):
        checksum = helper.submit(zlib.crc32, chunk, crc)
        write_all(descriptor, chunk)
        crc = checksum.result()
    write_all(descriptor, memoryview(bytes(-tensor.nbytes % ALIGNMENT)))
    return crc


def write_all(descriptor: int, data: memoryview) -> None:
    """Write all of ``data`` to a file that may take a part of it at a time."""
    while data:
        data = data[os.write(descriptor, data) :]


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of ``tensor`` in row-major order, in host memory, some MB at a time."""
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        flat = tensor.reshape(-1)
        step = CHUNK // tensor.element_size()
        for start in range(0, flat.numel(), step):
            part = flat[start : start + step].to("cpu").view(torch.uint8)
            yield memoryview(part.numpy())  # type: ignore[arg-type]
        return
    row = math.prod(tensor.shape[1:]) * tensor.element_size()
    step = max(CHUNK // row, 1)
    for start in range(0, tensor.shape[0], step):
        rows = tensor[start : start + step]
        yield from _chunks(rows.contiguous() if row <= CHUNK else rows[0])


def publish(partial: Path, final: Path, ranks: int, facts: Mapping[str, Any]) -> Index:
    """Make a checkpoint of what ``ranks`` ranks wrote into ``partial``; rank 0 alone calls this.

    Raises:
        CheckpointError: a part is missing or has another size, or the parts do not hold every
            element of every tensor exactly once.
        OSError: the file system failed.
    """
    index = join([_read_part(partial, rank) for rank in range(ranks)])
    index.facts = {**facts, "published": time.time()}
    write_index(index, partial / INDEX)
    for rank in range(ranks):
        (partial / mark(rank)).unlink()
    sync_folder(partial)
    old = final.with_name(final.name + REPLACED)
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(final, old)
    try:
        os.rename(partial, final)
    except OSError:
        if old.exists():
            os.rename(old, final)
        raise
    sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)
    return index


def _read_part(partial: Path, rank: int) -> Index:
    path = partial / mark(rank)
    try:
        part = parse_index(path.read_text(encoding="utf-8"), str(path))
        sizes = {name: os.stat(partial / name).st_size for name in part.files}
    except OSError as error:
        raise CheckpointError(f"rank {rank} has not finished its part: {error}") from None
    if sizes != part.files:
        raise CheckpointError(f"rank {rank} wrote {part.files}, but the disk holds {sizes}")
    return part


def join(parts: Iterable[Index]) -> Index:
    """Return one index of all ranks' parts.

    Raises:
        CheckpointError: ranks disagree about a tensor, or an element of one is missing or doubled.
    """
    whole = Index()
    for part in parts:
        whole.files.update(part.files)
        for key, tensor in part.tensors.items():
            known = whole.tensors.setdefault(key, StoredTensor(tensor.dtype, tensor.shape))
            if (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
                raise CheckpointError(
                    f"ranks disagree about {key}: {known.dtype} {list(known.shape)} and "
                    f"{tensor.dtype} {list(tensor.shape)}"
                )
            known.boxes += tensor.boxes
    for key, tensor in whole.tensors.items():
        problem = uncovered(tensor.shape, [box.box for box in tensor.boxes])
        if problem is not None:
            raise CheckpointError(f"{key} is not stored exactly once: {problem}")
    return whole


def lacking_space(folder: Path, size: int) -> str | None:
    """Say why ``size`` bytes do not fit on the disk of ``folder``; None if they do."""
    free = shutil.disk_usage(folder).free
    if size <= free:
        return None
    return f"{folder} has {human_bytes(free)} free, a checkpoint takes {human_bytes(size)}"


def save(items: Iterable[Item], final: Path, facts: Mapping[str, Any], world: Axis) -> Index | None:
    """Write and publish a checkpoint; a collective of ``world``. Rank 0 gets its index.

    Raises:
        SaveError: it failed on some rank; every rank raises, and nothing is left behind.
    """
    partial = final.with_name(final.name + PARTIAL)
    first = world.coordinate == 0
    staged = stage(items)
    published: list[Index] = []
    try:
        problem = attempt(lambda: _prepare(partial), first)
        sizes = comm.gather_objects(staged.bytes, world)
        if first and problem is None:
            problem = lacking_space(partial, sum(sizes))
        agree(problem, world)
        agree(attempt(lambda: write(staged, partial, world.coordinate), True), world)
        problem = attempt(
            lambda: published.append(publish(partial, final, world.size, facts)), first
        )
        agree(problem, world)
    except SaveError:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return published[0] if published else None


def _prepare(partial: Path) -> None:
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)


def attempt(action: Callable[[], object], mine: bool) -> str | None:
    """Do ``action`` if it is this rank's; say what the file system or a check had against it."""
    try:
        if mine:
            action()
    except (OSError, CheckpointError) as error:
        return str(error)
    return None


def agree(problem: str | None, world: Axis, error: type[Exception] = SaveError) -> None:
    """Go on if no rank has a problem; a collective of ``world``.

    Raises:
        SaveError: some rank has one; every rank raises (or ``error``, which loading gives).
    """
    problems = [
        f"rank {rank}: {text}" if world.size > 1 else text
        for rank, text in enumerate(comm.gather_objects(problem, world))
        if text is not None
    ]
    if problems:
        raise error("; ".join(problems))
