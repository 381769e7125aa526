"""Saving a run: what it is at the boundary of an iteration, published whole or not at all."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core import comm
from megatron.core.dist_checkpointing import catalog, plan
from megatron.core.dist_checkpointing.format import Index
from megatron.core.dist_checkpointing.plan import Item
from megatron.core.dist_checkpointing.save import (
    SaveError,
    agree,
    agreed,
    lacking_space,
    save,
    whatever,
)
from megatron.core.dist_checkpointing.staging import stage
from megatron.core.mesh import Mesh
from megatron.core.utils import human_bytes
from megatron.training.checkpoints import facts as checkpoint_facts
from megatron.training.checkpoints import random_states
from megatron.training.checkpoints.contents import OPTIMIZER, items, random_key
from megatron.training.checkpoints.run import CheckpointedRun
from megatron.training.state import TrainState


@dataclass(frozen=True)
class Saved:
    """How a save ended."""

    folder: Path | None
    """The published checkpoint; None when the save failed."""
    error: str | None
    seconds: float
    """From its begin to its end."""
    bytes: int = 0
    stall: float | None = None
    """Seconds that training waited for it; None: for all of it."""


def save_checkpoint(run: CheckpointedRun, state: TrainState) -> Saved:
    """Save to --save, move the tracker, and drop what retention does not keep.

    A collective of the world, at the boundary of an iteration. A failure (full disk, quota, a lease
    that is lost ...) is reported and returned; older checkpoints and the tracker are then as they
    were.
    """
    begin = time.monotonic()
    final = announced(run, state)
    try:
        clear(run, final.parent)
        everything, stored = gathered(run, state)
        index = save(everything, final, stored, run.mesh.world, run.check_lease)
        move_tracker(final.parent, state.iteration, run.mesh)
    except SaveError as error:
        return failed(run, state.iteration, error, time.monotonic() - begin)
    size = index.bytes if index is not None else 0
    saved = Saved(final, None, time.monotonic() - begin, size)
    conclude(run, state.iteration, saved, index)
    return saved


# What saving at once and saving in the background (`saver`) have in common.


def announced(run: CheckpointedRun, state: TrainState) -> Path:
    """Say what is to be saved, and return the folder of the checkpoint."""
    save_to = run.config.save
    assert save_to is not None, "nowhere to save to"
    run.say(f"saving checkpoint at iteration {state.iteration:7d} to {save_to}")
    return Path(save_to) / catalog.folder_name(state.iteration)


def gathered(run: CheckpointedRun, state: TrainState) -> tuple[list[Item], dict[str, Any]]:
    """Return `contents` and `facts`, if every rank could make its own; a collective of the world.

    Raises:
        SaveError: some rank could not, for want of memory, say; every rank raises.
    """
    return agreed(lambda: (contents(run), facts(run, state)), run.mesh.world)


def contents(run: CheckpointedRun) -> list[Item]:
    """Return what this rank writes: its share of weights and states, and its random generators."""
    everything = _tensors(run)
    if not run.config.save_optim:
        everything = [item for item in everything if not item.key.startswith(OPTIMIZER)]
    if run.config.save_rng:
        everything.append(_random_item(run.mesh))
    return everything


def _tensors(run: CheckpointedRun) -> list[Item]:
    return items(
        run.models,
        run.optimizer,
        run.mesh,
        saving=True,
        states=run.config.save_optim,
        spread=run.config.speed.ckpt_fully_parallel_save,
    )


def clear(run: CheckpointedRun, root: Path) -> None:
    """Remove what saves that were stopped have left in ``root``; a collective of the world.

    Raises:
        SaveError: rank 0 could not, or its lease is lost; every rank raises.
    """

    def act() -> None:
        run.check_lease()
        for kept in catalog.clear(root):
            run.say(f"WARNING: {kept} is left alone: another process may still write there")

    world = run.mesh.world
    agree(whatever(act, world.coordinate == 0), world)


def move_tracker(root: Path, iteration: int, mesh: Mesh) -> None:
    """Make a published checkpoint the newest; collective, and raises, as `clear`."""
    first = mesh.world.coordinate == 0
    problem = whatever(lambda: catalog.write_tracker(root, iteration), first)
    if problem is not None:
        there = root / catalog.folder_name(iteration)
        problem = f"{there} is in place and whole, but moving the tracker failed: {problem}"
    agree(problem, mesh.world)


def failed(run: CheckpointedRun, iteration: int, error: SaveError, seconds: float) -> Saved:
    """Report a save that failed."""
    run.say(f"WARNING: saving iteration {iteration} to {run.config.save} failed: {error}")
    return Saved(None, str(error), seconds)


def conclude(run: CheckpointedRun, iteration: int, saved: Saved, index: Index | None) -> None:
    """Say how a save went that was published, and drop what retention does not keep (rank 0)."""
    waited = "" if saved.stall is None else f", of which training waited {saved.stall:.2f} s"
    run.say(
        f"  successfully saved checkpoint from iteration {iteration:7d} to {run.config.save} "
        f"({human_bytes(saved.bytes)} in {saved.seconds:.1f} s{waited}, "
        f"{human_bytes(saved.bytes / max(saved.seconds, 1e-9))}/s, "
        f"hash {index.hash if index is not None else ''})"
    )
    if index is not None:
        _retain(run)


def _random_item(mesh: Mesh) -> Item:
    states = random_states.pack(mesh.device)
    box = ((0, states.numel()),)
    piece = plan.Piece(box, states)
    return Item(random_key(mesh), tuple(states.shape), states.dtype, (piece,))


def facts(run: CheckpointedRun, state: TrainState) -> dict[str, Any]:
    """Return what the checkpoint says of the run; later changes of ``state`` do not reach it."""
    optimizer = run.optimizer if run.config.save_optim else None
    schedule = run.facts.schedule
    return {
        "iteration": state.iteration,
        "progress": state.to_json(),
        "parts": {"optimizer": optimizer is not None, "random": run.config.save_rng},
        "optimizer": dict(optimizer.scalars()) if optimizer is not None else {},
        "schedule": schedule.to_json() if schedule is not None else None,
        "objective": run.facts.objective,
        "tokenizer": run.facts.tokenizer,
        "vocabulary": run.facts.vocabulary,
        "vocabulary_rows": run.facts.vocabulary_rows,
        "environment": checkpoint_facts.environment(run.mesh),
        "config": dict(run.facts.config),
    }


def _retain(run: CheckpointedRun) -> None:
    last, interval = run.config.save_keep_last, run.config.save_retain_interval
    if last is None and interval is None:
        return
    assert run.config.save is not None
    try:
        removed = catalog.prune(Path(run.config.save), last or 1, interval)
    except OSError as error:
        run.say(f"WARNING: older checkpoints were not removed: {error}")
        return
    if removed:
        run.say(f"  removed {', '.join(folder.name for folder in removed)}")


def warn_of_space(run: CheckpointedRun) -> None:
    """Warn at the start when not even one checkpoint will fit; a collective of the world."""
    if run.config.save is None:
        return
    world, root = run.mesh.world, Path(run.config.save)
    size = sum(comm.gather_objects(stage(_tensors(run)).bytes, world))
    if world.coordinate == 0:
        root.mkdir(parents=True, exist_ok=True)
        problem = lacking_space(root, size)
        if problem is not None:
            run.say(f"WARNING: {problem}: the first save will fail")
