"""Checkpoints that each machine keeps on its own disk: what its ranks hold, no shared folder.

    ROOT/iter_0000010-18f3a2b4c5d6/     a save; the number after the iteration tells it from others
        rank00003.bin                   boxes, as in any checkpoint
        rank00003.json                  the rank's part of the index, written last

A save is complete when, over all machines, the parts of all its ranks are there; nobody publishes
it. Ranks share out what they hold alike, and where copies are asked for each rank also keeps the
parts of its partners (`Copies`), which are elsewhere. Finding joins the parts that the machines
have; `local_reading` loads them.
"""

import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.core import comm
from megatron.core.dist_checkpointing.catalog import folder_name
from megatron.core.dist_checkpointing.format import (
    CheckpointError,
    Index,
    parse_index,
    write_index,
)
from megatron.core.dist_checkpointing.local_copies import ALONE, Copies, exchange, part_name
from megatron.core.dist_checkpointing.machine import Place, place
from megatron.core.dist_checkpointing.part import mark, write
from megatron.core.dist_checkpointing.plan import Item
from megatron.core.dist_checkpointing.save import (
    SaveError,
    agree,
    agreed,
    attempt,
    check_space,
    join,
    whatever,
)
from megatron.core.dist_checkpointing.staging import stage
from megatron.core.mesh import Axis
from megatron.core.utils import make_folder

UNFINISHED = "no rank finished its part"
"""Why a save that was given up, or killed, is none."""
_NAME = re.compile(r"iter_([0-9]+)-([0-9a-f]{12})")
_PART = re.compile(r"rank[0-9]+\.json")


@dataclass(frozen=True)
class LocalFound:
    """A complete save, as one rank sees it."""

    iteration: int
    name: str
    """Of its folder on every machine."""
    index: Index
    holders: Mapping[str, int]
    """By file, the first rank that has it at hand."""
    own: frozenset[str]
    """Files on this machine that are whole, as far as their sizes say."""
    beside: tuple[int, ...]
    """Ranks that see the same folder, this one among them."""

    def checked(self, rank: int) -> list[str]:
        """Return the files whose checksums ``rank`` compares; ranks of a machine share them out."""
        return sorted(self.own)[self.beside.index(rank) :: len(self.beside)]


def save_local(
    items: Iterable[Item],
    root: Path,
    iteration: int,
    facts: Mapping[str, Any],
    world: Axis,
    device: torch.device,
    copies: Copies = ALONE,
    allowed: Callable[[], None] = lambda: None,
) -> tuple[Path, int]:
    """Save what each rank owns to its machine's ``root``, then remove older saves there.

    A collective of ``world``. Returns the folder and the bytes of all ranks, without copies.
    ``allowed`` is called before, and raises OSError where nothing may be saved.

    Raises:
        SaveError: it failed on some rank; every rank raises, and older saves are as they were,
            unless the message says that this one is whole.
    """
    published = comm.broadcast_object(time.time(), world)
    folder = root / f"{folder_name(iteration)}-{round(1000 * published):012x}"
    rank = world.coordinate
    try:
        agree(whatever(allowed, True), world)
        staged = agreed(lambda: stage(items), world)
        here = agreed(lambda: _made(folder), world)
        everyone = comm.gather_objects((here, staged.bytes), world)
        agree(whatever(lambda: _check_space(folder, rank, everyone, copies), True), world)
        part = agreed(lambda: write(staged, folder, rank), world)
        part.facts = {**facts, "published": published, "ranks": world.size}
        if copies.count > 1:
            exchange(folder, part, world, device, copies)
        # The names of parts make the save: the last thing that each rank writes.
        agree(whatever(lambda: write_index(part, folder / part_name(rank)), True), world)
    except SaveError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    problem = whatever(lambda: _drop_older(folder, rank), True)
    if problem is not None:
        problem = f"{folder} is whole, but removing older saves failed: {problem}"
    agree(problem, world)
    return folder, sum(size for _, size in everyone)


def _made(folder: Path) -> Place:
    """Make a folder and return where it is."""
    make_folder(folder)
    return place(folder.parent)


def _drop_older(folder: Path, rank: int) -> None:
    """Remove other saves beside a complete one."""
    (folder / mark(rank)).unlink(missing_ok=True)
    for older in _saves(folder.parent):
        if older.name != folder.name:
            shutil.rmtree(older, ignore_errors=True)


def _saves(root: Path) -> list[Path]:
    """Return the folders of saves, oldest first by iteration."""
    if not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if _NAME.fullmatch(path.name))


def _check_space(
    folder: Path, rank: int, everyone: Sequence[tuple[Place | None, int]], copies: Copies
) -> None:
    """Refuse what goes to this rank's disk if all of it does not fit; as `save.check_space`."""
    here, sizes = everyone[rank][0], [size for _, size in everyone]
    inside = [other for other, (where, _) in enumerate(everyone) if where == here]
    check_space(folder, sum(sizes[p] for r in inside for p in copies.partners(r)))


def find_local(
    root: Path | None, world: Axis, step: int | None = None
) -> tuple[LocalFound | None, dict[str, str]]:
    """Return the newest complete save and why others are none; a collective of ``world``.

    A machine whose disk cannot be read has none; the reason has the name ``.``, of its folder.

    Args:
        root: this machine's folder; None for a rank that has none.
        world: all ranks, which need not be those that saved.
        step: take the save of this iteration.
    """
    problem, where, claims, here = _look(root)
    has = {
        name: {rank: part.facts["ranks"] for rank, part in parts.items()}
        for name, parts in here.items()
    }
    everyone = comm.gather_objects((problem, where, claims, has), world)
    problems, places, claimed, seen = zip(*everyone, strict=True)
    beside = tuple(rank for rank, one in enumerate(places) if one == where)
    reasons = _lacks(claimed, seen)
    names = {name for one in seen for name in one}
    complete = [name for name in names - reasons.keys() if step is None or _iteration(name) == step]
    failed = [f"rank {rank} cannot read it: {one}" for rank, one in enumerate(problems) if one]
    if failed:
        reasons["."] = "; ".join(failed)
    if not complete:
        return None, reasons
    name = max(complete, key=lambda one: one.rpartition("-")[2])
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
    # A copy that says anything else than the part that was joined is as if it were not here.
    own = frozenset(
        file
        for rank, part in here.get(name, {}).items()
        for file in part.files
        if part.text() == texts[rank]
    )
    return LocalFound(_iteration(name), name, index, holders, own, beside), reasons


def _look(
    root: Path | None,
) -> tuple[str | None, Place | None, set[str], dict[str, dict[int, Index]]]:
    """Return what is wrong with this rank's disk, its place, names that claim to be saves, parts.

    Nothing is raised, since the other ranks wait for what is here.
    """
    where: list[Place] = []
    claims, found = set[str](), dict[str, dict[int, Index]]()

    def look() -> None:
        if root is None:
            return
        where.append(place(root))
        saves = _saves(root)
        claims.update(folder.name for folder in saves if _texts(folder))
        found.update({folder.name: _parts(folder) for folder in saves})

    problem = attempt(look, True)
    return problem, where[0] if where else None, claims, found


def _lacks(
    claimed: Sequence[set[str]], seen: Sequence[Mapping[str, Mapping[int, int]]]
) -> dict[str, str]:
    """Return by name why a save is none; given for each rank: claims, and parts by save."""
    reasons = {}
    for name in sorted({name for one in seen for name in one}):
        there = [one.get(name, {}) for one in seen]
        sizes = {ranks for one in there for ranks in one.values()}
        absent = sorted(set(range(max(sizes, default=1))) - {rank for one in there for rank in one})
        if not any(name in one for one in claimed):
            reasons[name] = UNFINISHED
        elif absent:
            reasons[name] = f"no machine of this run has the part of rank {absent[0]}"
            reasons[name] += f" ({len(absent)} parts are missing)" if len(absent) > 1 else ""
    return reasons


def _iteration(name: str) -> int:
    found = _NAME.fullmatch(name)
    assert found is not None, name
    return int(found[1])


def _texts(folder: Path) -> list[Path]:
    """Return the parts' texts of a save's folder; with its first one it claims to be a save."""
    return [path for path in folder.glob("rank*.json") if _PART.fullmatch(path.name)]


def _parts(folder: Path) -> dict[int, Index]:
    """Return the parts in a save's folder whose files are here too, by rank."""
    found = {}
    for path in _texts(folder):
        try:
            part = parse_index(path.read_text(encoding="utf-8"), str(path))
            sizes = {name: os.stat(folder / name).st_size for name in part.files}
        except (OSError, UnicodeDecodeError, CheckpointError):
            continue  # half removed, or damaged: as if it were not here
        if sizes == part.files:
            found[int(path.stem.removeprefix("rank"))] = part
    return found
