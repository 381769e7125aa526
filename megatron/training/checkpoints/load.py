"""Carrying a run on: how each part of a checkpoint comes back.

Loading sets, never adds: to load twice is to load once. The log says which part came from where.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from megatron.core import comm
from megatron.core.dist_checkpointing.format import CheckpointError
from megatron.core.dist_checkpointing.load import check_bytes, load
from megatron.core.dist_checkpointing.reader import Checkpoint, DamagedError
from megatron.core.dist_checkpointing.save import agree, attempt
from megatron.core.mesh import Mesh
from megatron.core.optimizer.config import ScheduleConfig
from megatron.core.optimizer.schedule import Schedule
from megatron.core.utils import Say, human_bytes
from megatron.training.checkpoint_config import CheckpointConfig
from megatron.training.checkpoints import facts as checkpoint_facts
from megatron.training.checkpoints import random_states
from megatron.training.checkpoints.contents import (
    MASTERS,
    OPTIMIZER,
    RANDOM,
    Optimizer,
    items,
    random_key,
)
from megatron.training.checkpoints.facts import RunFacts
from megatron.training.checkpoints.recovery import Local, newest_local, open_source
from megatron.training.checkpoints.source import Source, choose
from megatron.training.processes.rank_zero import from_first
from megatron.training.state import TrainState

_WAYS_OUT = (
    "Check the model's flags (--use-checkpoint-args takes them from the checkpoint); "
    "--no-load-optim leaves the optimizer's state out, --dist-ckpt-strictness log_all goes on "
    "without what has no partner, --ckpt-step takes another checkpoint."
)


@dataclass(frozen=True)
class Loaded:
    """What a run starts with."""

    state: TrainState
    schedule: Schedule | None
    """The schedule to follow."""
    folder: Path | None = None
    """None for a start from scratch."""
    hash: str = ""
    parts: tuple[str, ...] = ()
    """What came from the checkpoint: weights, optimizer, random, progress."""


def load_checkpoint(
    config: CheckpointConfig,
    schedule_config: ScheduleConfig,
    mesh: Mesh,
    models: Sequence[nn.Module],
    optimizer: Optimizer | None,
    run: RunFacts,
    say: Say,
) -> Loaded:
    """Set weights, optimizer, random states and progress from the checkpoint to start from.

    A collective of the world. Without a checkpoint (see `source.choose`) nothing is
    touched and the run starts at iteration 0.

    Raises:
        UserError: there is something to load, but it cannot be, or does not fit; with a schedule
            other than the stored one and no flag to say which, too.
    """
    local = newest_local(config, mesh, say)
    source = _sound(config, mesh, local, say)
    if source is None:
        return Loaded(TrainState(), run.schedule)
    begin, folder, facts = time.monotonic(), source.found.folder, source.found.index.facts
    kind = "" if source.found.is_ours else f", in the format {source.found.index.format} (Megatron)"
    say(f" loading checkpoint from {folder.parent} at iteration {facts['iteration']}{kind}")
    fresh = source.weights_only
    with_optimizer = config.load_optim and not fresh and optimizer is not None
    _check_parts(source, with_optimizer)
    if with_optimizer:
        checkpoint_facts.check_rule(facts, run, folder)
    schedules = [run.schedule]

    def follow() -> None:
        """Choose the schedule, which is only worth a word where the weights fit."""
        if not fresh:
            schedules.append(checkpoint_facts.follow(facts, run, schedule_config, say))

    checkpoint_facts.compare(facts, run, mesh, say, fresh=fresh)
    wanted = items(
        models,
        optimizer,
        mesh,
        saving=False,
        states=with_optimizer,
        masters=not config.load_main_params_from_ckpt,
    )
    with open_source(source, local, mesh, wanted) as checkpoint:
        try:
            report = load(
                wanted,
                checkpoint,
                mesh.world,
                strictness=config.dist_ckpt_strictness,
                set_aside=_set_aside(config, with_optimizer),
                fits=follow,
            )
        except CheckpointError as error:
            raise CheckpointError(f"{error}\n{_WAYS_OUT}") from None
        if with_optimizer and optimizer is not None:
            optimizer.load_scalars(facts["optimizer"])
        if optimizer is not None:
            optimizer.reload()
        wants_random = config.load_rng and not fresh
        got_random = wants_random and _load_random(checkpoint, mesh, say)
    comm.barrier(mesh.world)
    checkpoint_facts.tell(report, config, say)
    got = {
        "weights": True,
        "optimizer": with_optimizer,
        "random": got_random,
        "progress": not fresh,
    }
    parts = tuple(part for part, loaded in got.items() if loaded)
    state = TrainState() if fresh else _progress(facts, config, say)
    say(
        f"  successfully loaded checkpoint from {folder.parent} at iteration {facts['iteration']}: "
        f"{checkpoint_facts.parts_line(parts, config, fresh)}; {report.tensors} tensors, "
        f"{human_bytes(report.bytes)} in {time.monotonic() - begin:.1f} s from {folder.name}, "
        f"hash {report.hash}"
    )
    return Loaded(state, schedules[-1], folder, report.hash, parts)


def _sound(config: CheckpointConfig, mesh: Mesh, local: Local | None, say: Say) -> Source | None:
    """Return what to load, its checksums compared; None to start from scratch. A collective.

    One that is damaged is passed over with a warning, as one that is not whole is.

    Raises:
        UserError: as `source.choose`; or a damaged one was asked for by name, or is the last.
    """
    damaged: dict[Path, str] = {}
    on_disks = local.source if local is not None else None
    while True:
        # One rank chooses, so that all take the same checkpoint.
        source = from_first(mesh.world, lambda: choose(config, say, on_disks, damaged))
        if source is None or not config.verify_integrity:
            return source
        folder = source.found.folder
        with open_source(source, local, mesh) as checkpoint:
            try:
                check_bytes(checkpoint, mesh.world)
                return source
            except DamagedError as error:
                if source.is_named:
                    raise DamagedError(
                        f"{error}\n--ckpt-step takes another checkpoint of {folder.parent}."
                    ) from None
                damaged[folder] = str(error)  # `choose` tells it


def _progress(facts: Mapping[str, Any], config: CheckpointConfig, say: Say) -> TrainState:
    """Return the stored counters, the iteration as the flags want it."""
    state = TrainState.from_json(facts["progress"])
    if config.override_ckpt_iteration is not None:
        say(f"iteration {state.iteration} counts as {config.override_ckpt_iteration}")
        state.iteration = config.override_ckpt_iteration
    return state


def _set_aside(config: CheckpointConfig, with_optimizer: bool) -> tuple[str, ...]:
    """Return what the keys that are left out on purpose begin with."""
    if not with_optimizer:
        return (RANDOM, OPTIMIZER)
    return (RANDOM, MASTERS) if config.load_main_params_from_ckpt else (RANDOM,)


def _check_parts(source: Source, with_optimizer: bool) -> None:
    """Refuse a checkpoint that lacks a part that is asked for."""
    folder, facts = source.found.folder, source.found.index.facts
    if with_optimizer and not facts["parts"]["optimizer"]:
        why = facts["parts"].get("why")
        problem = (
            f"cannot be read with its optimizer: {why}"
            if why
            else ("was saved without the optimizer's state")
        )
        raise CheckpointError(
            f"{folder} {problem}; give --no-load-optim to start with a fresh one, or --finetune to "
            "start at iteration 0"
        )
    if facts["progress"] is None and not source.weights_only:
        raise CheckpointError(
            f"{folder} does not say how many samples its run had consumed; give --finetune to "
            "start at iteration 0 with its weights"
        )


def _load_random(checkpoint: Checkpoint, mesh: Mesh, say: Say) -> bool:
    """Set this rank's generators; say whether all ranks could. A collective of the world.

    Raises:
        CheckpointError: some rank's states cannot be read; every rank raises.
    """
    key = random_key(mesh)
    here = key in checkpoint.index.tensors

    def unpack() -> None:
        states = checkpoint.read(key)
        try:
            random_states.unpack(states, mesh.device)
        except ValueError as error:
            raise CheckpointError(
                f"{checkpoint.folder}: {error}; --no-load-rng leaves them out"
            ) from None

    agree(attempt(unpack, here), mesh.world, CheckpointError)
    everywhere = all(comm.gather_objects(here, mesh.world))
    if not everywhere:
        say("random states are not in the checkpoint for every rank; others start from the seed")
    return everywhere
