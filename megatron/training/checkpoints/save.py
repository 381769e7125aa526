"""Saving a run: what it is at the boundary of an iteration, published whole or not at all."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from megatron.core import comm
from megatron.core.dist_checkpointing import catalog, plan
from megatron.core.dist_checkpointing.plan import Item
from megatron.core.dist_checkpointing.save import (
    SaveError,
    agree,
    attempt,
    lacking_space,
    save,
    stage,
)
from megatron.core.mesh import Mesh
from megatron.core.utils import Say, human_bytes
from megatron.training.checkpoints import facts as checkpoint_facts
from megatron.training.checkpoints import random_states
from megatron.training.checkpoints.contents import OPTIMIZER, Optimizer, items, random_key
from megatron.training.checkpoints.facts import RunFacts
from megatron.training.config import CheckpointConfig
from megatron.training.state import TrainState


@dataclass(frozen=True)
class Saved:
    """How a save ended."""

    folder: Path | None
    """The published checkpoint; None when the save failed."""
    error: str | None
    seconds: float
    bytes: int = 0


def save_checkpoint(
    config: CheckpointConfig,
    mesh: Mesh,
    models: Sequence[nn.Module],
    optimizer: Optimizer | None,
    state: TrainState,
    run: RunFacts,
    say: Say,
) -> Saved:
    """Save to ``config.save``, move the tracker, and drop what retention does not keep.

    A collective of the world, at the boundary of an iteration. A failure (full disk, quota ...) is
    reported and returned; older checkpoints and the tracker are then as they were.
    """
    assert config.save is not None, "nowhere to save to"
    root, begin = Path(config.save), time.monotonic()
    final = root / catalog.folder_name(state.iteration)
    say(f"saving checkpoint at iteration {state.iteration:7d} to {config.save}")
    everything = items(models, optimizer, mesh, saving=True, states=config.save_optim)
    if not config.save_optim:
        everything = [item for item in everything if not item.key.startswith(OPTIMIZER)]
    if config.save_rng:
        everything.append(_random_item(mesh))
    facts = _facts(config, mesh, optimizer, state, run)
    first = mesh.world.coordinate == 0
    try:
        agree(attempt(lambda: catalog.clear(root), first), mesh.world)
        index = save(everything, final, facts, mesh.world)
        agree(attempt(lambda: catalog.write_tracker(root, state.iteration), first), mesh.world)
    except SaveError as error:
        seconds = time.monotonic() - begin
        say(f"WARNING: saving iteration {state.iteration} to {config.save} failed: {error}")
        return Saved(None, str(error), seconds)
    size, digest = (index.bytes, index.hash) if index is not None else (0, "")
    seconds = time.monotonic() - begin
    say(
        f"  successfully saved checkpoint from iteration {state.iteration:7d} to {config.save} "
        f"({human_bytes(size)} in {seconds:.1f} s, {human_bytes(size / max(seconds, 1e-9))}/s, "
        f"hash {digest})"
    )
    if index is not None:
        _retain(config, root, say)
    return Saved(final, None, seconds, size)


def _random_item(mesh: Mesh) -> Item:
    states = random_states.pack(mesh.device)
    box = ((0, states.numel()),)
    piece = plan.Piece(box, states)
    return Item(random_key(mesh), tuple(states.shape), states.dtype, (piece,))


def _facts(
    config: CheckpointConfig,
    mesh: Mesh,
    optimizer: Optimizer | None,
    state: TrainState,
    run: RunFacts,
) -> dict[str, Any]:
    with_optimizer = config.save_optim and optimizer is not None
    facts = {
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
    return facts


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
    everything = items(models, optimizer, mesh, saving=True, states=config.save_optim)
    size = sum(comm.gather_objects(stage(everything).bytes, mesh.world))
    if mesh.world.coordinate == 0:
        Path(config.save).mkdir(parents=True, exist_ok=True)
        problem = lacking_space(Path(config.save), size)
        if problem is not None:
            say(f"WARNING: {problem}: the first save will fail")
