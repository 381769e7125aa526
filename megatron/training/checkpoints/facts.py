"""What a checkpoint says of its run, and what differs when another run takes it up.

Settings may change between a save and a load. What would change results is a warning, what is the
user's wish is a line, and a schedule follows the flags or the checkpoint, never a mixture.
"""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.core.config import as_json
from megatron.core.dist_checkpointing.load import LoadReport
from megatron.core.mesh import Mesh
from megatron.core.optimizer import schedule as schedules
from megatron.core.optimizer.config import ScheduleConfig
from megatron.core.optimizer.schedule import Schedule
from megatron.core.utils import Say, UserError
from megatron.training.checkpoint_config import CheckpointConfig

ORDER = (
    "ddp_bucket_size",
    "ddp_num_buckets",
    "overlap_grad_reduce",
    "data_parallel_sharding_strategy",
    "num_distributed_optimizer_instances",
    "micro_batch_size",
)
"""Settings that change in which order gradients are summed, as the layout does."""

PLACES = ("load", "save")
"""Settings that say where a run reads and writes, which is no difference between two runs."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a run is, besides its progress."""

    config: Mapping[str, Any]
    """Flat values of the resolved run config."""
    schedule: Schedule | None
    tokenizer: str
    """Fingerprint."""
    vocabulary: int
    """Ids in use."""
    vocabulary_rows: int
    """Rows of the embedding that stand for an id; never the padded number."""
    objective: str
    """``tokens`` (mean over the batch's tokens) or ``microbatches`` (mean of their means)."""


def environment(mesh: Mesh) -> dict[str, Any]:
    """Return what may change the order in which sums are rounded."""
    cuda = mesh.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(mesh.device) if cuda else platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "layout": layout(mesh),
    }


def layout(mesh: Mesh) -> str:
    """Return the sizes of a layout's axes in a few words, such as ``tp2 pp4 dp8``."""
    axes = [mesh[name] for name in ("tp", "cp", "ep", "pp", "dp") if mesh[name].size > 1]
    return " ".join(f"{axis.name}{axis.size}" for axis in axes) or "one rank"


def follow(
    facts: Mapping[str, Any], run: RunFacts, config: ScheduleConfig, say: Say
) -> Schedule | None:
    """Return the schedule to follow, and show both curves where they differ.

    Raises:
        UserError: they differ, and no flag says which is meant.
    """
    if run.schedule is None or facts.get("schedule") is None:
        return run.schedule
    stored = completed_schedule(facts["schedule"], run.schedule, run.config)
    use_stored = config.use_checkpoint_opt_param_scheduler
    if use_stored and (stored.decoupled_lr is None) != (run.schedule.decoupled_lr is None):
        there = "has no" if stored.decoupled_lr is None else "has a"
        raise UserError(
            f"--use-checkpoint-opt_param-scheduler: the checkpoint's schedule {there} rate of its "
            "own for embedding and head, so that parameters are grouped otherwise: "
            + ("drop" if stored.decoupled_lr is None else "give")
            + " --decoupled-lr"
        )
    chosen = schedules.choose(
        stored,
        run.schedule,
        override=config.override_opt_param_scheduler,
        use_checkpoint=use_stored,
    )
    if schedules.differences(stored, run.schedule):
        whose = "the checkpoint" if use_stored else "the flags"
        say(f"schedule of {whose} is followed (old: the checkpoint's, new: the flags')")
        for line in schedules.describe_change(stored, run.schedule):
            say(f"  {line}")
    return chosen


def check_rule(facts: Mapping[str, Any], run: RunFacts, folder: Path) -> None:
    """Refuse states of another update rule: some have the same names and mean something else.

    Raises:
        UserError: the checkpoint is of another ``--optimizer``.
    """
    stored = facts.get("config", {})
    for name in ("optimizer", "muon_scalar_optimizer"):
        before, now = stored.get(name), run.config.get(name)
        if before is not None and now is not None and before != now:
            said = f"--{name.replace('_', '-')}"
            raise UserError(
                f"{folder} has the states of {said} {before}, this run has {said} {now}: give "
                f"{said} {before}, or --no-load-optim to start with fresh states"
            )
        if now != "muon":
            return


def completed_schedule(
    stored: Mapping[str, Any], current: Schedule, config: Mapping[str, Any]
) -> Schedule:
    """Return a checkpoint's schedule; what it leaves out is as in ``current``.

    Megatron-LM counts in samples where its run was counted in iterations. Where the run's batches
    divide the lengths they stand in iterations here.
    """
    known = {**current.to_json(), **stored}
    lengths = ("warmup", "decay", "length")
    batch = int(config.get("global_batch_size", 0))
    is_partial = not set(current.to_json()) <= set(stored)
    if is_partial and known["unit"] == "samples" and current.unit == "iterations":
        whole = batch > 0 and all(known[name] % batch == 0 for name in lengths)
        if whole and not config.get("rampup_batch_size"):
            known |= {name: int(known[name]) // batch for name in lengths}
            known["unit"] = "iterations"
    return Schedule.from_json(known)


def compare(facts: Mapping[str, Any], run: RunFacts, mesh: Mesh, say: Say, *, fresh: bool) -> None:
    """Say what is not as it was, where that changes what the run does."""
    here = {
        "tokenizer": run.tokenizer,
        "vocabulary": run.vocabulary,
        "vocabulary_rows": run.vocabulary_rows,
        "objective": run.objective,
    }
    for name, value in here.items():
        if name in facts and facts[name] != value:
            say(f"WARNING: {name} was {facts[name]} in the checkpoint and is {value} here")
    if fresh:
        return
    before, now = facts.get("environment", {}), environment(mesh)
    stored = facts.get("config", {})
    changed = [
        f"{name} {before[name]} -> {value}"
        for name, value in now.items()
        if name in before and before[name] != value
    ]
    changed += [
        f"{name} {stored[name]} -> {as_json(run.config[name])}"
        for name in ORDER
        if name in stored and name in run.config and stored[name] != as_json(run.config[name])
    ]
    if changed:
        say(
            f"WARNING: {', '.join(changed)}: sums may be rounded in another order, so the run "
            "need not continue bit for bit"
        )
    causes = _other_masks(stored, run.config)
    if causes:
        say(
            f"WARNING: {', '.join(causes)}: --hidden-dropout and --attention-dropout draw other "
            "masks then, so losses differ by more than rounding, as with another --seed"
        )
    different = [
        f"{name} {stored[name]} -> {as_json(value)}"
        for name, value in run.config.items()
        if name in stored and name not in (*ORDER, *PLACES) and stored[name] != as_json(value)
    ]
    if different:
        say(f"settings that differ from the checkpoint's: {', '.join(different)}")


def _other_masks(stored: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Return what makes dropout masks other ones than those of the run that wrote a checkpoint.

    A mask is drawn for what a rank holds of a microbatch (`core.rng.DropoutKey`). Context
    parallelism cuts all of it, tensor parallelism the heads, and with sequence parallelism what is
    added to the residual stream too.
    """
    names = ["micro_batch_size", "context_parallel_size"]
    before, now = dict(stored), {name: as_json(value) for name, value in config.items()}
    if now.get("attention_dropout"):
        names.append("tensor_model_parallel_size")
    if now.get("hidden_dropout"):
        for settings in (before, now):
            size, cut = (
                settings.get(name) for name in ("tensor_model_parallel_size", "sequence_parallel")
            )
            # What sequence parallelism cuts in two by itself: 1 without, the ranks with it.
            settings["pieces"] = None if size is None or cut is None else size if cut else 1
        if before["pieces"] != now["pieces"]:
            names += ["tensor_model_parallel_size", "sequence_parallel"]
    elif not now.get("attention_dropout"):
        return []
    return [
        f"{name} {before[name]} -> {now[name]}"
        for name in dict.fromkeys(names)
        if name in before and name in now and before[name] != now[name]
    ]


def tell(report: LoadReport, config: CheckpointConfig, say: Say) -> None:
    """Say what was converted, substituted, missing and left over."""
    for (before, now), keys in report.converted.items():
        say(f"converted {len(keys)} tensors from {before} to {now}, such as {keys[0]}")
    if report.substituted:
        key, source = next(iter(report.substituted.items()))
        say(f"{len(report.substituted)} tensors filled from others, such as {key} from {source}")
    if config.dist_ckpt_strictness == "ignore_all":
        return
    for word in ("missing", "unexpected"):
        keys = getattr(report, word)
        if keys:
            fate = "they keep their initial values" if word == "missing" else "they are left out"
            say(f"WARNING: {len(keys)} {word} tensors, {fate}: {', '.join(keys)}")


def parts_line(parts: Sequence[str], config: CheckpointConfig, fresh: bool) -> str:
    """Return which parts came from the checkpoint, and why the others did not."""
    reasons = {
        "optimizer": "not asked for" if config.load_optim else "--no-load-optim",
        "random": "from the seed, since "
        + ("the checkpoint has none for every rank" if config.load_rng else "--no-load-rng"),
        "progress": "weights only",
    }
    if fresh:
        reasons = dict.fromkeys(
            reasons, "weights only: a release, --finetune, --pretrained-checkpoint or upcycling"
        )
    return ", ".join(
        f"{part} loaded" if part in parts else f"{part} fresh ({reasons[part]})"
        for part in ("weights", "optimizer", "random", "progress")
    )
