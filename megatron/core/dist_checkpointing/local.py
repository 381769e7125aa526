"""Checkpoints that each machine keeps on its own disk: what its ranks hold, no shared folder.

    ROOT/iter_0000010-18f3a2b4c5d6/     a save; the number after the iteration tells it from others
        rank00003.bin                   boxes, as in any checkpoint
        rank00003.json                  the rank's part of the index, written last

A save is complete when, over all machines, the parts of all its ranks are there; nobody publishes
it. Ranks share out what they hold alike, and where copies are asked for each rank also keeps the
parts of its partners (`Copies`), which are elsewhere. Loading joins the parts that the machines
have: every rank reads what is here, and what it lacks is sent by a rank that has it, so that the
layout, and the places of the ranks, may be others than those that saved.
"""

import bisect
import functools
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core import comm
from megatron.core.dist_checkpointing.catalog import folder_name
from megatron.core.dist_checkpointing.format import (
    CHUNK,
    CheckpointError,
    Index,
    parse_index,
    write_index,
)
from megatron.core.dist_checkpointing.part import mark, write, write_all
from megatron.core.dist_checkpointing.plan import Item, intersection
from megatron.core.dist_checkpointing.reader import Checkpoint
from megatron.core.dist_checkpointing.save import (
    SaveError,
    agree,
    attempt,
    join,
    lacking_space,
)
from megatron.core.dist_checkpointing.staging import stage
from megatron.core.mesh import Axis
from megatron.core.sharding import Box


@dataclass(frozen=True)
class Copies:
    """Which ranks keep the same parts: ``count`` of them, ``jump`` apart; one keeps its own only.

    With 8 ranks, jump 2 and count 2, those are (0, 2) (1, 3) (4, 6) (5, 7).
    """

    jump: int = 1
    count: int = 1

    def partners(self, rank: int) -> tuple[int, ...]:
        """Return all ranks that keep the part of ``rank``, itself included, in ascending order."""
        block = self.jump * self.count
        first = rank // block * block + rank % self.jump
        return tuple(range(first, first + block, self.jump))


@dataclass(frozen=True)
class LocalFound:
    """A complete save, as one rank sees it."""

    iteration: int
    name: str
    """Of its folder on every machine."""
    index: Index
    holders: Mapping[str, int]
    """By file, the first rank that has it at hand."""


def place(root: Path) -> tuple[str, str]:
    """Return the machine and the folder that ``root`` is."""
    return socket.gethostname(), os.path.realpath(root)


def save_local(
    items: Iterable[Item],
    root: Path,
    iteration: int,
    facts: Mapping[str, Any],
    world: Axis,
    device: torch.device,
    copies: Copies = Copies(),
) -> tuple[Path, int]:
    """Save what each rank owns to its machine's ``root``, then remove older saves there.

    A collective of ``world``. Returns the folder and the bytes of all ranks, without copies.

    Raises:
        SaveError: it failed on some rank; every rank raises, and older saves are as they were.
    """
    published = comm.broadcast_object(time.time(), world)
    folder = root / f"{folder_name(iteration)}-{round(1000 * published):012x}"
    staged = stage(items)
    rank = world.coordinate
    try:
        problem = attempt(lambda: folder.mkdir(parents=True, exist_ok=True), True)
        everyone = comm.gather_objects((place(root), staged.bytes), world)
        agree(problem or _lacking(folder, rank, everyone, copies), world)
        parts: list[Index] = []
        agree(attempt(lambda: parts.append(write(staged, folder, rank)), True), world)
        part = parts[0]
        part.facts = {**facts, "published": published, "ranks": world.size}
        if copies.count > 1:
            _exchange(folder, part, world, device, copies)
        # The names of parts make the save: the last thing that each rank writes.
        agree(attempt(lambda: write_index(part, folder / _part(rank)), True), world)
    except SaveError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    (folder / mark(rank)).unlink(missing_ok=True)
    for older in _saves(root):
        if older.name != folder.name:
            shutil.rmtree(older, ignore_errors=True)
    return folder, sum(size for _, size in everyone)


def _part(rank: int) -> str:
    return f"rank{rank:05d}.json"


def _saves(root: Path) -> list[Path]:
    """Return the folders of saves, oldest first by iteration."""
    return sorted(root.glob("iter_*-*")) if root.is_dir() else []


def _lacking(
    folder: Path, rank: int, everyone: list[tuple[tuple[str, str], int]], copies: Copies
) -> str | None:
    """Say why all that goes to this rank's disk does not fit there; None if it does."""
    here, sizes = everyone[rank][0], [size for _, size in everyone]
    inside = [other for other, (where, _) in enumerate(everyone) if where == here]
    return lacking_space(folder, sum(sizes[p] for r in inside for p in copies.partners(r)))


def _exchange(folder: Path, part: Index, world: Axis, device: torch.device, copies: Copies) -> None:
    """Give this rank's part and file to its partners and write theirs; a collective of ``world``.

    Each passes on what it got, as in a ring, a chunk at a time.
    """
    rank = world.coordinate
    partners = copies.partners(rank)
    ring = Axis("copies", partners, partners.index(rank), world.group)
    text = part.text().encode()
    name = next(iter(part.files), None)
    own = (len(text), part.bytes, name)
    told = comm.gather_objects(own, world)
    length = max(told[one][0] + told[one][1] for one in partners)
    others = [partners[(ring.coordinate - hop) % len(partners)] for hop in range(1, len(partners))]
    writers = {one: _Copy(folder, one, *told[one]) for one in others}
    problem = None
    for chunk in _stream(folder, text, name, length):
        passed = chunk.to(device)
        for one in others:
            passed = comm.shift(passed, ring).wait()
            if problem is None:  # whoever cannot write goes on to pass on
                problem = attempt(functools.partial(writers[one].add, passed), True)
    for copy in writers.values():
        problem = problem or attempt(copy.finish, True)
        copy.close()
    agree(problem, world)


def _stream(folder: Path, text: bytes, name: str | None, length: int) -> Iterator[Tensor]:
    """Yield ``length`` bytes, a chunk at a time: a part, its file, and zeros after them."""
    file = open(folder / name, "rb") if name is not None else None  # noqa: SIM115 (closed below)
    try:
        head = text
        for start in range(0, length, CHUNK):
            size = min(CHUNK, length - start)
            data, head = head[:size], head[size:]
            if file is not None and len(data) < size:
                data += file.read(size - len(data))
            yield torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
    finally:
        if file is not None:
            file.close()


class _Copy:
    """Takes another rank's part and file as they come, and writes them."""

    def __init__(self, folder: Path, rank: int, head: int, size: int, name: str | None) -> None:
        self.path, self.head, self.left = folder / _part(rank), head, size
        self.text = b""
        self.target = folder / name if name is not None else None
        self.file: int | None = None

    def add(self, chunk: Tensor) -> None:
        """Take the next bytes of the stream."""
        data = chunk.to("cpu").numpy().tobytes()
        missing = self.head - len(self.text)
        self.text += data[:missing]
        body = data[missing : missing + self.left]
        self.left -= len(body)
        if self.target is not None and body:
            if self.file is None:
                self.file = os.open(self.target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            write_all(self.file, memoryview(body))

    def finish(self) -> None:
        """Put all of it on disk, the part last."""
        if self.file is not None:
            os.fsync(self.file)
        index = parse_index(self.text.decode(), f"the part for {self.path}")
        write_index(index, self.path)

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            os.close(self.file)


def find_local(
    root: Path | None, world: Axis, step: int | None = None
) -> tuple[LocalFound | None, dict[str, str]]:
    """Return the newest complete save and why others are none; a collective of ``world``.

    Args:
        root: this machine's folder; None for a rank that has none.
        world: all ranks, which need not be those that saved.
        step: take the save of this iteration.
    """
    here = {folder.name: _parts(folder) for folder in _saves(root)} if root is not None else {}
    seen = comm.gather_objects(
        {
            name: {rank: part.facts["ranks"] for rank, part in parts.items()}
            for name, parts in here.items()
        },
        world,
    )
    complete, reasons = [], {}
    for name in sorted({name for one in seen for name in one}):
        there = [one.get(name, {}) for one in seen]
        sizes = {ranks for one in there for ranks in one.values()}
        absent = sorted(set(range(max(sizes, default=1))) - {rank for one in there for rank in one})
        if absent:
            reasons[name] = f"no machine of this run has the part of rank {absent[0]}"
            reasons[name] += f" ({len(absent)} parts are missing)" if len(absent) > 1 else ""
        elif step is None or _iteration(name) == step:
            complete.append(name)
    if not complete:
        return None, reasons
    name = max(complete, key=lambda one: int(one.rpartition("-")[2], 16))
    holder: dict[int, int] = {}
    for rank, one in enumerate(seen):
        for part in one.get(name, {}):
            holder.setdefault(part, rank)
    mine = {part: here[name][part].text() for part in holder if holder[part] == world.coordinate}
    texts = {part: text for one in comm.gather_objects(mine, world) for part, text in one.items()}
    parts = {part: parse_index(texts[part], f"part {part} of {name}") for part in sorted(texts)}
    index = join(parts.values())
    index.facts = parts[0].facts
    holders = {file: holder[rank] for rank, part in parts.items() for file in part.files}
    return LocalFound(_iteration(name), name, index, holders), reasons


def _iteration(name: str) -> int:
    return int(name.removeprefix("iter_").partition("-")[0])


def _parts(folder: Path) -> dict[int, Index]:
    """Return the parts in a save's folder whose files are here too, by rank."""
    found = {}
    for path in folder.glob("rank*.json"):
        try:
            part = parse_index(path.read_text(encoding="utf-8"), str(path))
            sizes = {name: os.stat(folder / name).st_size for name in part.files}
        except (OSError, CheckpointError):
            continue  # half removed, or damaged: as if it were not here
        if sizes == part.files:
            found[int(path.stem.removeprefix("rank"))] = part
    return found


class LocalCheckpoint(Checkpoint):
    """A complete save, open for reading: what is not on this machine is sent by another."""

    def __init__(self, root: Path | None, found: LocalFound, world: Axis, device: torch.device):
        super().__init__((root or Path()) / found.name, found.index)
        self.holders, self.world, self.device = found.holders, world, device
        self._received: dict[str, list[tuple[int, Tensor]]] = {}

    def damages(
        self,
        files: Iterable[str] | None = None,
        told: Callable[[str, int], None] = lambda key, size: None,
    ) -> list[str]:
        """Return what does not match its checksum, in the files that this rank sends.

        Each file is one rank's to send, so that all ranks together compare all, whichever ``files``
        are asked for here.
        """
        mine = [name for name, rank in self.holders.items() if rank == self.world.coordinate]
        return super().damages(mine, told)

    def fetch(self, wanted: Iterable[tuple[str, Box]]) -> None:
        """Receive what boxes of tensors need and this machine lacks; a collective of the world."""
        lacking = set(self._lacking(wanted))
        everyone = comm.gather_objects(sorted(lacking), self.world)
        for file, offset, length in sorted({one for rank in everyone for one in rank}):
            data = self._send(file, offset, length)
            if (file, offset, length) in lacking:
                self._received.setdefault(file, []).append((offset, data))

    def _lacking(self, wanted: Iterable[tuple[str, Box]]) -> Iterator[tuple[str, int, int]]:
        for key, box in wanted:
            stored = self.index.tensors[key]
            for one in stored.boxes:
                if intersection(one.box, box) is not None and not (self.folder / one.file).exists():
                    yield one.file, one.offset, stored.bytes_of(one)

    def _send(self, file: str, offset: int, length: int) -> Tensor:
        """Return bytes of a file that one rank has, on all ranks."""
        holder = self.holders[file]
        data = torch.empty(length, dtype=torch.uint8)
        if holder == self.world.coordinate:
            super()._read(file, data, offset)
        for start in range(0, length, CHUNK):
            part = data[start : start + CHUNK]
            moved = part.to(self.device)
            comm.broadcast(moved, self.world, holder)
            part.copy_(moved)
        return data

    def _read(self, file: str, out: Tensor, offset: int) -> None:
        """Fill a flat uint8 tensor from a file, or from what was received of it."""
        received = self._received.get(file)
        if received is None:
            super()._read(file, out, offset)
            return
        start, data = received[bisect.bisect([first for first, _ in received], offset) - 1]
        out.copy_(data[offset - start : offset - start + out.numel()])
