"""The lines a run prints, as pure functions of numbers.

The training line keeps the order, names and number formats that people's log parsers read; fields
of our own stand after those.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Interval:
    """What the iterations since the last training line amount to."""

    iteration: int
    train_iters: int
    consumed_samples: int
    skipped_samples: int = 0
    elapsed_ms: float
    """Mean per iteration."""
    learning_rate: float
    decoupled_learning_rate: float | None = None
    global_batch_size: int
    losses: Mapping[str, float]
    """Means over the interval's iterations that were not skipped; NaN when all were."""
    loss_scale: float = 1.0
    grad_norm: float | None = None
    num_zeros: int | None = None
    params_norm: float | None = None
    group_norms: Mapping[str, float] = field(default_factory=dict)
    """Norms of the gradient by optimizer group."""
    experts: Mapping[str, float] = field(default_factory=dict)
    """How evenly experts were loaded, by name."""
    skipped: int = 0
    nan: int = 0
    throughput: float | None = None
    """TFLOP/s per GPU, shown with --log-throughput."""
    tokens_per_second: float | None = None
    eta_seconds: float | None = None
    epochs: Sequence[tuple[str, float]] = field(default=())
    """How far into each data source the run is, in epochs."""


def training_line(now: datetime, interval: Interval) -> str:
    """Return the line of one log interval."""
    fields = [
        f" iteration {interval.iteration:8d}/{interval.train_iters:8d}",
        f" consumed samples: {interval.consumed_samples:12d}",
    ]
    if interval.skipped_samples:
        fields.append(f" skipped samples: {interval.skipped_samples:12d}")
    fields.append(f" elapsed time per iteration (ms): {interval.elapsed_ms:.1f}")
    if interval.throughput is not None:
        fields.append(f" throughput per GPU (TFLOP/s/GPU): {interval.throughput:.1f}")
    fields.append(f" learning rate: {interval.learning_rate:.6E}")
    if interval.decoupled_learning_rate is not None:
        fields.append(f" decoupled learning rate: {interval.decoupled_learning_rate:.6E}")
    fields.append(f" global batch size: {interval.global_batch_size:5d}")
    fields += [f" {name}: {value:.6E}" for name, value in interval.losses.items()]
    fields.append(f" loss scale: {interval.loss_scale:.1f}")
    if interval.grad_norm is not None:
        fields.append(f" grad norm: {interval.grad_norm:.3f}")
    fields += [f" grad norm of {n}: {norm:.3f}" for n, norm in interval.group_norms.items()]
    if interval.num_zeros is not None:
        fields.append(f" num zeros: {interval.num_zeros}")
    if interval.params_norm is not None:
        fields.append(f" params norm: {interval.params_norm:.3f}")
    fields += [
        f" number of skipped iterations: {interval.skipped:3d}",
        f" number of nan iterations: {interval.nan:3d}",
    ]
    if interval.tokens_per_second is not None:
        fields.append(f" tokens per second: {interval.tokens_per_second:.0f}")
    fields += [f" {name}: {value:.4f}" for name, value in interval.experts.items()]
    if interval.eta_seconds is not None:
        fields.append(f" ETA: {duration(interval.eta_seconds)}")
    if interval.epochs:
        fields.append(" data epochs: " + ", ".join(f"{n} {e:.2f}" for n, e in interval.epochs))
    return f" [{now:%Y-%m-%d %H:%M:%S.%f}]" + " |".join(fields) + " |"


def expert_lines(layers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each layer with experts: their loads in one iteration, and its losses."""
    lines = []
    for row in layers:
        numbers = {name: value for name, value in row.items() if name not in ("layer", "tokens")}
        fields = [f" experts of layer {row['layer']:4d}"]
        fields += [f" {name}: {value:.4f}" for name, value in numbers.items()]
        fields.append(f" tokens: {' '.join(map(str, row['tokens']))}")
        lines.append(" |".join(fields) + " |")
    return lines


def validation_lines(where: str, losses: Mapping[str, float], name: str = "") -> str:
    """Return the result of an evaluation between dashed rules.

    Args:
        where: such as ``iteration 100`` or ``iteration 100 on test set``.
        losses: mean loss per name.
        name: of the validation set, when there are several.
    """
    line = f" validation loss at {where}" + (f" ({name})" if name else "") + " | "
    for key, value in losses.items():
        line += f"{key} value: {value:.6E} | {key} PPL: {perplexity(value):.6E} | "
    rule = "-" * (len(line) + 1)
    return f"{rule}\n{line}\n{rule}"


def perplexity(loss: float) -> float:
    """Return exp(loss), capped where it would only be a number of digits."""
    return math.exp(min(20.0, loss)) if loss == loss else math.nan


def duration(seconds: float) -> str:
    """Return seconds as ``1:02:03``, with days before that when there are any."""
    total = max(0, round(seconds))
    days, rest = divmod(total, 86400)
    text = f"{rest // 3600}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}d {text}" if days else text


def parameter_line(stage: int, tensor: int, count: int) -> str:
    """Return the line with the number of parameters that one model-parallel rank holds."""
    return (
        f" > number of parameters on (tensor, pipeline) model parallel rank ({tensor}, {stage}): "
        f"{count}"
    )


def memory_line(rank: int, iteration: int, memory: Mapping[str, float]) -> str:
    """Return the line with memory in MB after the first iterations."""
    fields = " | ".join(f"{name}: {value / 2**20:.2f}" for name, value in memory.items())
    return f"[Rank {rank}] (after {iteration} iterations) memory (MB) | {fields}"


def memory_block(
    iteration: int, rank: int, measured: Mapping[str, int], planned: Mapping[str, int]
) -> str:
    """Return the lines with the bytes of each category on one rank of the pipeline.

    Args:
        iteration: after which they were measured.
        rank: of the pipeline.
        measured: by category; of several ranks there, what is most.
        planned: likewise; a category need not be in both, and one of nothing is left out.
    """
    title = f" memory after iteration {iteration} on pipeline rank {rank} (bytes)"
    lines = [f"{title:<60} {'measured':>17} {'planned':>17}"]
    names = [*planned, *(name for name in measured if name not in planned)]
    for name in names:
        if not (measured.get(name) or planned.get(name)):
            continue
        found, wanted = (f"{held[name]:,}" if name in held else "-" for held in (measured, planned))
        lines.append(f"   {name:<57} {found:>17} {wanted:>17}")
    return "\n".join(lines)
