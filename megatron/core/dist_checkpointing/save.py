"""Saving: stage, write, publish, each a function of its own.

`stage` lists what this rank writes, and copies it when training is to go on meanwhile (`staging`);
`write` puts it into a folder beside the checkpoint's and leaves a done-mark, the rank's part of the
index (`part`); `publish`, on rank 0 alone, joins the parts, checks that every element of every
tensor is there exactly once, and renames the folder. None of the three communicates, so `write` may
run in the background (`background`); `save` is the three in a row for all ranks. Until the rename,
older checkpoints are not touched and nothing looks like a new one; when a step fails on any rank,
for whatever reason, all raise `SaveError` and the folder goes.
"""

import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from megatron.core import comm
from megatron.core.dist_checkpointing.boxes import uncovered
from megatron.core.dist_checkpointing.format import (
    INDEX,
    CheckpointError,
    Index,
    StoredTensor,
    parse_index,
    write_index,
)
from megatron.core.dist_checkpointing.part import mark, write
from megatron.core.dist_checkpointing.plan import Item
from megatron.core.dist_checkpointing.publishing import (
    draw_token,
    make_partial,
    partial_of,
    put_in_place,
)
from megatron.core.dist_checkpointing.staging import stage
from megatron.core.mesh import Axis
from megatron.core.utils import human_bytes

Made = TypeVar("Made")


class SaveError(Exception):
    """A save failed, and left nothing behind if it does not say so; older checkpoints are whole."""


def publish(partial: Path, final: Path, ranks: int, facts: Mapping[str, Any]) -> Index:
    """Make a checkpoint of what ``ranks`` ranks wrote into ``partial``; rank 0 alone calls this.

    Raises:
        CheckpointError: a part is missing or has another size, or the parts do not hold every
            element of every tensor exactly once.
        InPlaceError: the checkpoint is there, but may not survive a power cut.
        OSError: the file system failed.
    """
    index = join([_read_part(partial, rank) for rank in range(ranks)])
    index.facts = {**facts, "published": time.time()}
    write_index(index, partial / INDEX)
    for rank in range(ranks):
        (partial / mark(rank)).unlink()
    put_in_place(partial, final)
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


def save(
    items: Iterable[Item],
    final: Path,
    facts: Mapping[str, Any],
    world: Axis,
    allowed: Callable[[], None] = lambda: None,
) -> Index | None:
    """Write and publish a checkpoint; a collective of ``world``. Rank 0 gets its index.

    Args:
        items: what this rank writes.
        final: the checkpoint's folder.
        facts: what the run says of itself.
        world: all ranks.
        allowed: called on rank 0 before it publishes; raises OSError if it must not.

    Raises:
        SaveError: it failed on some rank; every rank raises, and nothing is left behind, unless the
            message says so.
    """
    partial = agreed_partial(final, world)
    staged = agreed(lambda: stage(items), world)
    with removing(partial, world):
        prepare(partial, staged.bytes, world)
        agreed(lambda: write(staged, partial, world.coordinate), world)
        return agreed_publish(partial, final, facts, world, allowed)


def agreed_partial(final: Path, world: Axis) -> Path:
    """Return the folder that this save alone writes into; a collective of ``world``."""
    return partial_of(final, comm.broadcast_object(draw_token(), world))


@contextmanager
def removing(partial: Path, world: Axis) -> Iterator[None]:
    """Remove what a save has written when the block raises `SaveError`, as it does on all ranks."""
    try:
        yield
    except SaveError:
        if world.coordinate == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def prepare(partial: Path, size: int, world: Axis) -> None:
    """Make the folder that ``size`` bytes of this rank go to; a collective of ``world``.

    Raises:
        SaveError: it cannot be made, or what all ranks write does not fit.
    """
    first = world.coordinate == 0
    problem = whatever(lambda: make_partial(partial), first)
    sizes = comm.gather_objects(size, world)
    if problem is None:
        problem = whatever(lambda: check_space(partial, sum(sizes)), first)
    agree(problem, world)


def check_space(folder: Path, size: int) -> None:
    """Refuse what does not fit.

    Raises:
        CheckpointError: ``size`` bytes do not fit on the disk of ``folder``.
        OSError: nobody can say whether they do.
    """
    problem = lacking_space(folder, size)
    if problem is not None:
        raise CheckpointError(problem)


def agreed_publish(
    partial: Path,
    final: Path,
    facts: Mapping[str, Any],
    world: Axis,
    allowed: Callable[[], None] = lambda: None,
) -> Index | None:
    """Let rank 0 publish what all ranks wrote, and give it the index; a collective of ``world``.

    Raises:
        SaveError: it could not; every rank raises.
    """
    published: list[Index] = []

    def act() -> None:
        allowed()
        published.append(publish(partial, final, world.size, facts))

    agree(whatever(act, world.coordinate == 0), world)
    return published[0] if published else None


def attempt(action: Callable[[], object], mine: bool) -> str | None:
    """Do ``action`` if it is this rank's; say what the file system or a check had against it."""
    try:
        if mine:
            action()
    except (OSError, CheckpointError) as error:
        return str(error)
    return None


def whatever(action: Callable[[], object], mine: bool) -> str | None:
    """Do ``action`` if it is this rank's; say what went wrong, whatever it is.

    For saves: other ranks must learn of it, or they wait for this one, and a run that cannot save
    now may yet go on and save later. What is no failure of files is a fault of the program or lack
    of memory, so that its trace is printed too.
    """
    try:
        return attempt(action, mine)
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        return f"{type(error).__name__}: {error}"


def agreed(make: Callable[[], Made], world: Axis) -> Made:
    """Return what this rank makes, if every rank could make its own; a collective of ``world``.

    Raises:
        SaveError: some rank could not; every rank raises.
    """
    made: list[Made] = []
    agree(whatever(lambda: made.append(make()), True), world)
    return made[0]


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
