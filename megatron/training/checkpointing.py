"""Saving a run and carrying it on: what a checkpoint holds and how each part comes back.

A checkpoint has four parts: weights, optimizer state, random states, and facts (counters, schedule,
config, tokenizer ...), the last in JSON. Each is loaded or left out by a flag of its own, and the
log says which came from where. Loading sets, never adds: to load twice is to load once.

    model.NAME              a weight, without rows that only pad the vocabulary
    optimizer.master.NAME   its fp32 copy, where weights are bf16
    optimizer.KIND.NAME     a state of the update rule
    random.RANK             generators of a rank, as bytes

A master stands in for a weight of a run in fp32 or fp64, and a weight for a master that was not
stored, so that a run may go on in another precision.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatron.core import comm, sharding
from megatron.core.dist_checkpointing import catalog, plan
from megatron.core.dist_checkpointing.format import CheckpointError
from megatron.core.dist_checkpointing.load import Checkpoint, load
from megatron.core.dist_checkpointing.plan import Item
from megatron.core.dist_checkpointing.save import SaveError, lacking_space, save, stage
from megatron.core.mesh import Mesh
from megatron.core.optimizer.config import ScheduleConfig
from megatron.core.optimizer.schedule import Schedule
from megatron.core.sharding import Sharding
from megatron.core.utils import UserError, human_bytes
from megatron.training import checkpoint_facts, random_states
from megatron.training.checkpoint_facts import RunFacts
from megatron.training.checkpoint_source import Say, Source, choose
from megatron.training.config import CheckpointConfig
from megatron.training.state import TrainState

WEIGHTS, OPTIMIZER, RANDOM = "model.", "optimizer.", "random."
MASTERS = f"{OPTIMIZER}master."
_WAYS_OUT = (
    "Check the model's flags (--use-checkpoint-args takes them from the checkpoint); "
    "--no-load-optim leaves the optimizer's state out, --dist-ckpt-strictness log_all goes on "
    "without what has no partner, --ckpt-step takes another checkpoint."
)


class OptimizerTensor(Protocol):
    """A parameter's share of one kind of optimizer state."""

    key: str
    sharding: Sharding
    shape: tuple[int, ...]
    start: int
    tensor: Tensor


class Optimizer(Protocol):
    """What checkpoints need of an optimizer."""

    def tensors(self) -> Iterable[Any]: ...

    def scalars(self) -> Mapping[str, Any]: ...

    def load_scalars(self, stored: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Saved:
    """How a save ended."""

    folder: Path | None
    """The published checkpoint; None when the save failed."""
    error: str | None
    seconds: float
    bytes: int = 0


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


# What is saved, and filled


def items(
    models: Sequence[nn.Module],
    optimizer: Optimizer | None,
    mesh: Mesh,
    *,
    saving: bool,
    states: bool = True,
) -> list[Item]:
    """Return weights and optimizer state of this rank.

    Args:
        models: the model chunks; named parameters with records.
        optimizer: None to leave its state out; masters come along in any case.
        mesh: this rank's place.
        saving: take what this rank owns, and its share of what the replicas have alike; else
            everything it holds.
        states: take the states of the update rule.
    """
    coordinates = {axis.name: axis.coordinate for axis in mesh.axes.values()} if saving else None
    everything = list(_weights(models, coordinates))
    for tensor in optimizer.tensors() if optimizer is not None else ():
        is_master = tensor.key.startswith(MASTERS)
        if is_master or states:
            weight = WEIGHTS + tensor.sharding.name
            everything.append(
                plan.of_flat(
                    tensor.key,
                    tensor.sharding,
                    tensor.shape,
                    tensor.start,
                    tensor.tensor,
                    coordinates=coordinates,
                    sources=(tensor.key, weight) if is_master else (),
                )
            )
    if saving:
        return plan.spread(everything, mesh.dp_cp.coordinate, mesh.dp_cp.size)
    return everything


def _weights(models: Sequence[nn.Module], coordinates: Mapping[str, int] | None) -> Iterator[Item]:
    seen: set[int] = set()
    for model in models:
        for parameter in model.parameters():
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            record = sharding.of(parameter)
            key = WEIGHTS + record.name
            fine = parameter.dtype in (torch.float32, torch.float64)
            sources = (MASTERS + record.name, key) if fine else (key,)
            yield plan.of_tensor(key, record, parameter, coordinates=coordinates, sources=sources)


# Saving


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
    try:
        _agree(lambda: catalog.clear(root), mesh)
        index = save(everything, final, facts, mesh.world)
        _agree(lambda: catalog.write_tracker(root, state.iteration), mesh)
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
    return Item(_random_key(mesh), tuple(states.shape), states.dtype, (piece,))


def _random_key(mesh: Mesh) -> str:
    return f"{RANDOM}{mesh.rank:05d}"


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


def _agree(action: Callable[[], object], mesh: Mesh) -> None:
    """Let rank 0 act on the file system; raise on every rank when that failed."""
    problem = None
    if mesh.world.coordinate == 0:
        try:
            action()
        except OSError as error:
            problem = str(error)
    problem = comm.gather_objects(problem, mesh.world)[0]
    if problem is not None:
        raise SaveError(problem)


def _retain(config: CheckpointConfig, root: Path, say: Say) -> None:
    if config.save_keep_last is None and config.save_retain_interval is None:
        return
    try:
        removed = catalog.prune(root, config.save_keep_last or 1, config.save_retain_interval, ())
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


# Loading


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

    A collective of the world. Without a checkpoint (see `checkpoint_source.choose`) nothing is
    touched and the run starts at iteration 0.

    Raises:
        UserError: there is something to load, but it cannot be, or does not fit; with a schedule
            other than the stored one and no flag to say which, too.
    """
    source = _shared_choice(config, mesh, say)
    if source is None:
        return Loaded(TrainState(), run.schedule)
    begin, folder, facts = time.monotonic(), source.found.folder, source.found.index.facts
    say(f" loading checkpoint from {folder.parent} at iteration {facts['iteration']}")
    fresh = source.weights_only
    with_optimizer = config.load_optim and not fresh and optimizer is not None
    if with_optimizer and not facts["parts"]["optimizer"]:
        raise CheckpointError(
            f"{folder} was saved without the optimizer's state; give --no-load-optim to start "
            "with a fresh one, or --finetune to start at iteration 0"
        )
    schedule = run.schedule
    if not fresh:
        schedule = checkpoint_facts.follow(facts, run, schedule_config, say)
    checkpoint_facts.compare(facts, run, mesh, say, fresh=fresh)
    with Checkpoint(folder, source.found.index) as checkpoint:
        try:
            report = load(
                items(models, optimizer, mesh, saving=False, states=with_optimizer),
                checkpoint,
                mesh.world,
                strictness=config.dist_ckpt_strictness,
                set_aside=(RANDOM,) if with_optimizer else (RANDOM, OPTIMIZER),
                verify=config.verify_integrity,
            )
        except CheckpointError as error:
            raise CheckpointError(f"{error}\n{_WAYS_OUT}") from None
        if with_optimizer and optimizer is not None:
            optimizer.load_scalars(facts["optimizer"])
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
    state = TrainState() if fresh else TrainState.from_json(facts["progress"])
    say(
        f"  successfully loaded checkpoint from {folder.parent} at iteration {state.iteration}: "
        f"{checkpoint_facts.parts_line(parts, config, fresh)}; {report.tensors} tensors, "
        f"{human_bytes(report.bytes)} in {time.monotonic() - begin:.1f} s from {folder.name}, "
        f"hash {report.hash}"
    )
    return Loaded(state, schedule, folder, report.hash, parts)


def _shared_choice(config: CheckpointConfig, mesh: Mesh, say: Say) -> Source | None:
    """Let rank 0 choose, so that all ranks take the same checkpoint."""
    chosen: Source | UserError | None = None
    if mesh.world.coordinate == 0:
        try:
            chosen = choose(config, say)
        except UserError as error:
            chosen = error
    chosen = comm.gather_objects(chosen, mesh.world)[0]
    if isinstance(chosen, UserError):
        raise chosen
    return chosen


def _load_random(checkpoint: Checkpoint, mesh: Mesh, say: Say) -> bool:
    key = _random_key(mesh)
    here = key in checkpoint.index.tensors
    if here:
        random_states.unpack(checkpoint.read(key), mesh.device)
    everywhere = all(comm.gather_objects(here, mesh.world))
    if not everywhere:
        say("random states are not in the checkpoint for every rank; others start from the seed")
    return everywhere
