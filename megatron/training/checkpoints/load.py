"""Carrying a run on: how each part of a checkpoint comes back.

Loading sets, never adds: to load twice is to load once. The log says which part came from where.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.core import comm
from megatron.core.dist_checkpointing.format import CheckpointError
from megatron.core.dist_checkpointing.interface import Reader
from megatron.core.dist_checkpointing.load import LoadReport, check_bytes, load
from megatron.core.dist_checkpointing.local_reading import LocalCheckpoint
from megatron.core.dist_checkpointing.plan import Item
from megatron.core.dist_checkpointing.reader import Checkpoint, DamagedError
from megatron.core.dist_checkpointing.save import agree, attempt
from megatron.core.dist_checkpointing.strictness import LENIENT_ABOUT_MISSING
from megatron.core.mesh import Axis, Mesh
from megatron.core.optimizer.config import ScheduleConfig
from megatron.core.optimizer.schedule import Schedule
from megatron.core.progress import Bar, Told, untold
from megatron.core.utils import Say, human_bytes
from megatron.training.checkpoint_config import CheckpointConfig
from megatron.training.checkpoints import facts as checkpoint_facts
from megatron.training.checkpoints import random_states, settings, upcycling
from megatron.training.checkpoints.contents import (
    MASTERS,
    OPTIMIZER,
    RANDOM,
    items,
    random_key,
)
from megatron.training.checkpoints.recovery import Local, compared, newest_local, open_source
from megatron.training.checkpoints.run import CheckpointedRun
from megatron.training.checkpoints.source import Source, choose, ways_out
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


def load_checkpoint(run: CheckpointedRun, schedule: ScheduleConfig) -> Loaded:
    """Set weights, optimizer, random states and progress from the checkpoint to start from.

    A collective of the world. Without a checkpoint (see `source.choose`) nothing is
    touched and the run starts at iteration 0.

    Raises:
        UserError: there is something to load, but it cannot be, or does not fit; with a schedule
            other than the stored one and no flag to say which, too.
    """
    local, incomplete = newest_local(run.config, run.mesh, run.say)
    source, local = _sound(run, local, incomplete)
    upcycles, chosen = False, source
    if run.config.moe_use_upcycling:
        world = run.mesh.world
        upcycles = from_first(world, lambda: upcycling.applies(run.config, chosen, run.say))
    if source is None:
        return Loaded(TrainState(), run.facts.schedule)
    if upcycles:
        source = replace(source, weights_only=True)
    return _Loading(run, schedule, source, local, upcycles=upcycles).loaded()


class _Loading:
    """One load from a source that is there.

    Args:
        run: what is set.
        schedule: what the flags say of a schedule other than the stored one.
        source: what it is set from.
        local: the checkpoint on the machines' own disks that ``source`` may be.
        upcycles: it is a dense one, of which the run's experts are made.
    """

    def __init__(
        self,
        run: CheckpointedRun,
        schedule: ScheduleConfig,
        source: Source,
        local: Local | None,
        *,
        upcycles: bool,
    ) -> None:
        self._upcycles = upcycles
        self._run, self._schedule_config = run, schedule
        self._source, self._local = source, local
        self._folder, self._facts = source.found.folder, source.found.index.facts
        self._schedule = run.facts.schedule
        self._with_optimizer = (
            run.config.load_optim and not source.weights_only and run.optimizer is not None
        )

    def loaded(self) -> Loaded:
        """Compare, fill, and say what was loaded; a collective of the world."""
        begin, run, fresh = time.monotonic(), self._run, self._source.weights_only
        self._announce()
        self._check()
        report, has_random = self._fill()
        comm.barrier(run.mesh.world)
        checkpoint_facts.tell(report, run.config, run.say)
        got = {
            "weights": True,
            "optimizer": self._with_optimizer,
            "random": has_random,
            "progress": not fresh,
        }
        parts = tuple(part for part, is_loaded in got.items() if is_loaded)
        state = TrainState() if fresh else _progress(self._facts, run.config, run.say)
        run.say(
            f"  successfully loaded checkpoint from {self._folder.parent} at iteration "
            f"{self._facts['iteration']}: "
            f"{checkpoint_facts.parts_line(parts, run.config, fresh)}; {report.tensors} tensors, "
            f"{human_bytes(report.bytes)} in {time.monotonic() - begin:.1f} s from "
            f"{self._folder.name}, hash {report.hash}"
        )
        return Loaded(state, self._schedule, self._folder, report.hash, parts)

    def _announce(self) -> None:
        found = self._source.found
        kind = "" if found.is_ours else f", in the format {found.index.format} (Megatron)"
        self._run.say(
            f" loading checkpoint from {self._folder.parent} at iteration "
            f"{self._facts['iteration']}{kind}"
        )

    def _check(self) -> None:
        """Refuse what the index alone tells, and say where this run differs from that one."""
        run = self._run
        _check_parts(self._source, self._with_optimizer)
        if self._with_optimizer:
            checkpoint_facts.check_rule(self._facts, run.facts, self._folder)
        checkpoint_facts.compare(
            self._facts, run.facts, run.mesh, run.say, fresh=self._source.weights_only
        )

    def _fill(self) -> tuple[LoadReport, bool]:
        """Set weights, optimizer and generators; say whether all ranks' generators were there."""
        run = self._run
        wanted = items(
            run.models,
            run.optimizer,
            run.mesh,
            saving=False,
            states=self._with_optimizer,
            masters=not run.config.load_main_params_from_ckpt,
        )
        with open_source(self._source, self._local, run.mesh, wanted) as checkpoint:
            reader: Reader = checkpoint
            if self._upcycles:
                reader = upcycling.upcycled(run, checkpoint, wanted)
            report = self._fill_tensors(wanted, reader)
            if run.optimizer is not None:
                if self._with_optimizer:
                    run.optimizer.load_scalars(self._facts["optimizer"])
                run.optimizer.reload()
            wants_random = run.config.load_rng and not self._source.weights_only
            return report, wants_random and _load_random(checkpoint, run.mesh, run.say)

    def _fill_tensors(self, wanted: Sequence[Item], checkpoint: Reader) -> LoadReport:
        config, world = self._run.config, self._run.mesh.world
        held = sum(piece.tensor.nbytes for item in wanted for piece in item.pieces)
        try:
            with _bar(held, "loaded", world) as told:
                return load(
                    wanted,
                    checkpoint,
                    world,
                    strictness=config.dist_ckpt_strictness,
                    set_aside=_set_aside(config, self._with_optimizer),
                    fits=self._follow,
                    told=told,
                )
        except CheckpointError as error:
            stored, here = self._facts.get("config", {}), self._run.facts.config
            cause = settings.explain(stored, here, self._folder, upcycles=self._upcycles)
            raise CheckpointError(f"{cause}{error}\n{_WAYS_OUT}") from None

    def _follow(self) -> None:
        """Compare models and choose the schedule, worth a word only where the weights fit."""
        if not self._source.weights_only:
            config = self._run.config
            is_lenient = config.dist_ckpt_strictness in LENIENT_ABOUT_MISSING
            settings.check_model(
                self._facts.get("config", {}),
                self._run.facts.config,
                self._folder,
                self._run.say if is_lenient else None,
            )
            self._schedule = checkpoint_facts.follow(
                self._facts, self._run.facts, self._schedule_config, self._run.say
            )


def _bar(total: int, verb: str, world: Axis) -> AbstractContextManager[Told]:
    """Return the progress of rank 0, which stands for all; of others nothing is shown."""
    return Bar(total, verb) if world.coordinate == 0 else nullcontext(untold)


def _share(checkpoint: Checkpoint, world: Axis) -> int:
    """Return the bytes of which rank 0 compares the checksums, about."""
    if isinstance(checkpoint, LocalCheckpoint):
        return sum(checkpoint.files[file] for file in checkpoint.found.checked(world.coordinate))
    return sum(checkpoint.files.values()) // world.size


def _sound(
    run: CheckpointedRun, local: Local | None, incomplete: Mapping[Path, str]
) -> tuple[Source | None, Local | None]:
    """Return what to load, its checksums compared; None to start from scratch. A collective.

    One that is damaged is passed over with a warning, as one that is not whole is; of the one on
    local disks, which is returned too, only copies that are damaged.

    Raises:
        UserError: as `source.choose`; or a damaged one was asked for by name, or is the last.
    """
    config, world = run.config, run.mesh.world
    damaged: dict[Path, str] = {}
    on_disks = local.source if local is not None else None
    while True:
        # One rank chooses, so that all take the same checkpoint.
        source = from_first(world, lambda: choose(config, run.say, on_disks, damaged, incomplete))
        if source is None or not config.verify_integrity:
            return source, local
        folder = source.found.folder
        with open_source(source, local, run.mesh) as checkpoint:
            try:
                with _bar(_share(checkpoint, world), "checked", world) as told:
                    if local is not None and isinstance(checkpoint, LocalCheckpoint):
                        return source, compared(checkpoint, local, run.say, told)
                    check_bytes(checkpoint, world, told)
                    return source, local
            except DamagedError as error:
                if source.is_named:
                    raise DamagedError(f"{error}\n{ways_out(config, source.found)}") from None
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
