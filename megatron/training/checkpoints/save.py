"""Saving a run: what it is at the boundary of an iteration, published whole or not at all."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from megatron.core import comm
from megatron.core.dist_checkpointing import catalog, plan
from megatron.core.dist_checkpointing.format import Index
from megatron.core.dist_checkpointing.lease import Lease
from megatron.core.dist_checkpointing.plan import Item
from megatron.core.dist_checkpointing.save import (
    SaveError,
    agree,
    lacking_space,
    save,
    whatever,
)
from megatron.core.dist_checkpointing.staging import stage
from megatron.core.mesh import Mesh
from megatron.core.utils import Say, human_bytes
from megatron.training.checkpoint_config import CheckpointConfig
from megatron.training.checkpoints import facts as checkpoint_facts
from megatron.training.checkpoints import random_states
from megatron.training.checkpoints.contents import OPTIMIZER, Optimizer, items, random_key
from megatron.training.checkpoints.facts import RunFacts
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


def save_checkpoint(
    config: CheckpointConfig,
    mesh: Mesh,
    models: Sequence[nn.Module],
    optimizer: Optimizer | None,
    state: TrainState,
    run: RunFacts,
    say: Say,
    lease: Lease | None = None,
) -> Saved:
    """Save to ``config.save``, move the tracker, and drop what retention does not keep.

    A collective of the world, at the boundary of an iteration. A failure (full disk, quota ...) is
    reported and returned; older checkpoints and the tracker are then as they were. Rank 0 gives its
    ``lease``: without it being valid nothing is saved.
    """
    begin = time.monotonic()
    final = announced(config, state, say)
    everything = contents(config, mesh, models, optimizer)
    stored = facts(config, mesh, optimizer, state, run)
    try:
        clear(final.parent, mesh, say, lease)
        index = save(everything, final, stored, mesh.world, check_of(lease))
        move_tracker(final.parent, state.iteration, mesh)
    except SaveError as error:
        return failed(config, state.iteration, error, time.monotonic() - begin, say)
    size = index.bytes if index is not None else 0
    saved = Saved(final, None, time.monotonic() - begin, size)
    conclude(config, state.iteration, saved, index, say)
    return saved


# What saving at once and saving in the background (`saver`) have in common.


def announced(config: CheckpointConfig, state: TrainState, say: Say) -> Path:
    """Say what is to be saved, and return the folder of the checkpoint."""
    assert config.save is not None, "nowhere to save to"
    say(f"saving checkpoint at iteration {state.iteration:7d} to {config.save}")
    return Path(config.save) / catalog.folder_name(state.iteration)


def contents(
    config: CheckpointConfig, mesh: Mesh, models: Sequence[nn.Module], optimizer: Optimizer | None
) -> list[Item]:
    """Return what this rank writes: its share of weights and states, and its random generators."""
    everything = _tensors(config, mesh, models, optimizer)
    if not config.save_optim:
        everything = [item for item in everything if not item.key.startswith(OPTIMIZER)]
    if config.save_rng:
        everything.append(_random_item(mesh))
    return everything


def _tensors(
    config: CheckpointConfig, mesh: Mesh, models: Sequence[nn.Module], optimizer: Optimizer | None
) -> list[Item]:
    return items(
        models,
        optimizer,
        mesh,
        saving=True,
        states=config.save_optim,
        spread=config.speed.ckpt_fully_parallel_save,
    )


def clear(root: Path, mesh: Mesh, say: Say, lease: Lease | None) -> None:
    """Remove what saves that were stopped have left; a collective of the world.

    Raises:
        SaveError: rank 0 could not, or its lease is lost; every rank raises.
    """

    def act() -> None:
        check_of(lease)()
        for kept in catalog.clear(root):
            say(f"WARNING: {kept} is left alone: another process may still write there")

    agree(whatever(act, mesh.world.coordinate == 0), mesh.world)


def check_of(lease: Lease | None) -> Callable[[], None]:
    """Return what raises if a lease is lost."""
    return lease.check if lease is not None else lambda: None


def move_tracker(root: Path, iteration: int, mesh: Mesh) -> None:
    """Make a published checkpoint the newest; collective, and raises, as `clear`."""
    first = mesh.world.coordinate == 0
    problem = whatever(lambda: catalog.write_tracker(root, iteration), first)
    if problem is not None:
        there = root / catalog.folder_name(iteration)
        problem = f"{there} is in place and whole, but moving the tracker failed: {problem}"
    agree(problem, mesh.world)


def failed(
    config: CheckpointConfig, iteration: int, error: SaveError, seconds: float, say: Say
) -> Saved:
    """Report a save that failed."""
    say(f"WARNING: saving iteration {iteration} to {config.save} failed: {error}")
    return Saved(None, str(error), seconds)


def conclude(
    config: CheckpointConfig, iteration: int, saved: Saved, index: Index | None, say: Say
) -> None:
    """Say how a save went that was published, and drop what retention does not keep (rank 0)."""
    assert config.save is not None
    waited = "" if saved.stall is None else f", of which training waited {saved.stall:.2f} s"
    say(
        f"  successfully saved checkpoint from iteration {iteration:7d} to {config.save} "
        f"({human_bytes(saved.bytes)} in {saved.seconds:.1f} s{waited}, "
        f"{human_bytes(saved.bytes / max(saved.seconds, 1e-9))}/s, "
        f"hash {index.hash if index is not None else ''})"
    )
    if index is not None:
        _retain(config, Path(config.save), say)


def _random_item(mesh: Mesh) -> Item:
    states = random_states.pack(mesh.device)
    box = ((0, states.numel()),)
    piece = plan.Piece(box, states)
    return Item(random_key(mesh), tuple(states.shape), states.dtype, (piece,))


def facts(
    config: CheckpointConfig,
    mesh: Mesh,
    optimizer: Optimizer | None,
    state: TrainState,
    run: RunFacts,
) -> dict[str, Any]:
    """Return what the checkpoint says of the run; later changes of ``state`` do not reach it."""
    with_optimizer = config.save_optim and optimizer is not None
    return {
        "iteration": state.iteration,
        "progress": state.to_json(),
        "parts": {"optimizer": with_optimizer, "random": config.save_rng},
        "optimizer": dict(optimizer.scalars()) if with_optimizer and optimizer else {},
        "schedule": run.schedule.to_json() if run.schedule is not None else None,
        "objective": run.objective,
        "tokenizer": run.tokenizer,
        "vocabulary": run.vocabulary,
        "vocabulary_rows": run.vocabulary_rows,
        "environment": checkpoint_facts.environment(mesh),
        "config": dict(run.config),
    }


def _retain(config: CheckpointConfig, root: Path, say: Say) -> None:
    if config.save_keep_last is None and config.save_retain_interval is None:
        return
    try:
        removed = catalog.prune(root, config.save_keep_last or 1, config.save_retain_interval)
    except OSError as error:
        say(f"WARNING: older checkpoints were not removed: {error}")
        return
    if removed:
        say(f"  removed {', '.join(folder.name for folder in removed)}")


def warn_of_space(
    config: CheckpointConfig,
    mesh: Mesh,
    models: Sequence[nn.Module],
    optimizer: Optimizer | None,
    say: Say,
) -> None:
    """Warn at the start when not even one checkpoint will fit; a collective of the world."""
    if config.save is None:
        return
    here = stage(_tensors(config, mesh, models, optimizer)).bytes
    size = sum(comm.gather_objects(here, mesh.world))
    if mesh.world.coordinate == 0:
        Path(config.save).mkdir(parents=True, exist_ok=True)
        problem = lacking_space(Path(config.save), size)
        if problem is not None:
            say(f"WARNING: {problem}: the first save will fail")
