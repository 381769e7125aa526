"""What a run says about itself, from the numbers of each iteration to lines, files and dashboards.

`Metrics.add` takes one iteration's numbers, tensors among them staying on the device; `flush`
brings them over, in one copy and one more of loads of experts, and hands complete rows to the
writers. That happens at the log
interval, before a checkpoint and at the end. Only rank 0 prints and writes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import torch
from torch import Tensor

from megatron.core.utils import Say
from megatron.training import expert_loads
from megatron.training.expert_loads import LayerRow, Loads
from megatron.training.records import log_line
from megatron.training.records.writers import Writer

Number = float | Tensor


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """The numbers of one iteration, as the loop knows them when it is over."""

    iteration: int
    consumed_samples: int
    """Samples consumed up to and with this iteration."""
    skipped_samples: int
    """How many of those were not trained on, by request."""
    samples: range
    """Numbers of the samples of this iteration."""
    learning_rate: Number
    decoupled_learning_rate: Number | None = None
    """Of embedding and output head, where they have their own."""
    losses: Mapping[str, Number]
    """Mean per loss, by its name in a log line (`lm loss`)."""
    grad_norm: Number | None
    """Before clipping."""
    clipped_norm: Number | None = None
    """After it."""
    num_zeros: Number | None = None
    group_norms: Mapping[str, Number] = field(default_factory=dict)
    """Of the gradient, by optimizer group; when asked for."""
    params_norm: Number | None = None
    loss_scale: Number = 1.0
    """What the next iteration's loss is multiplied by, as Megatron-LM logs it."""
    skipped: bool = False
    nan: bool = False
    left_out: bool = False
    """By request (--iterations-to-skip): nothing was computed, so rates leave it out too."""
    loads: Loads | None = None
    """How tokens fell on experts."""
    elapsed_ms: float


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the metrics need to know of the run; constant."""

    train_iters: int
    seq_length: int
    world_size: int
    flops_per_sample: float
    peak_flops: float | None
    """FLOP/s of one device at this precision, if known."""
    attempt: int
    memory: Callable[[], int]
    """Bytes in use on this rank's device."""
    epochs: Callable[[int], Sequence[tuple[str, float]]] = lambda consumed: ()
    """(source, epochs read of it) after a number of consumed samples."""


class Metrics:
    """Collects iterations; prints, writes and forgets them."""

    def __init__(
        self,
        facts: Facts,
        writers: Sequence[Writer],
        out: Say,
        *,
        show_throughput: bool = False,
        show_experts: bool = False,
    ) -> None:
        self._facts = facts
        self._writers = writers
        self._out = out
        self._show_throughput = show_throughput
        self._show_experts = show_experts
        self._pending: list[Iteration] = []
        self._pending_memory: list[int] = []
        self._interval: list[dict[str, Any]] = []
        self._warmed_up = False

    def add(self, iteration: Iteration) -> None:
        """Take the numbers of one iteration."""
        self._pending.append(iteration)
        self._pending_memory.append(self._facts.memory())

    def flush(self) -> None:
        """Bring pending numbers to the host and write them."""
        values = _to_host(self._pending)
        loads = [one.loads for one in self._pending if one.loads is not None]
        layers = iter(expert_loads.rows(loads))
        rows = [
            self._row(one, numbers, memory, next(layers) if one.loads is not None else [])
            for one, numbers, memory in zip(
                self._pending, values, self._pending_memory, strict=True
            )
        ]
        self._pending, self._pending_memory = [], []
        self._interval += rows
        if rows:
            for writer in self._writers:
                writer.rows(rows)

    def print_line(self, now: datetime | None = None) -> None:
        """Flush, print the training line of the iterations since the last one, and start anew."""
        self.flush()
        rows, self._interval = self._interval, []
        if not rows:
            return
        self._out(
            log_line.training_line(
                now or datetime.now(),
                summarise(rows, self._facts, self._show_throughput, first=not self._warmed_up),
            )
        )
        if self._show_experts:
            for line in log_line.expert_lines(rows[-1].get("experts", ())):
                self._out(line)
        self._warmed_up |= any(not row["left_out"] for row in rows)

    def validation(
        self,
        *,
        iteration: int,
        consumed_samples: int,
        losses: Mapping[str, float],
        where: str,
        split: str = "valid",
        dataset: str = "",
    ) -> None:
        """Print and write the result of one evaluation."""
        self.flush()
        self._out(log_line.validation_lines(where, losses, dataset))
        row: dict[str, Any] = {"iteration": iteration, "split": split}
        if dataset:
            row["dataset"] = dataset
        row |= {_key(name): value for name, value in losses.items()}
        row |= {"consumed_samples": consumed_samples, "attempt": self._facts.attempt}
        row["loss_names"] = {_key(name): name for name in losses}
        for writer in self._writers:
            writer.validation(row)

    def timers(self, iteration: int, samples: int, seconds: Mapping[str, float]) -> None:
        """Write seconds per iteration of the phases of the last log interval."""
        for writer in self._writers:
            writer.timers(iteration, samples, seconds)

    def memory(
        self, iteration: int, rank: int, measured: Mapping[str, int], planned: Mapping[str, int]
    ) -> None:
        """Print and write the bytes of each category on one rank of the pipeline."""
        self.flush()
        self._out(log_line.memory_block(iteration, rank, measured, planned))
        row = {
            "iteration": iteration,
            "pipeline_rank": rank,
            "measured_bytes": dict(measured),
            "planned_bytes": dict(planned),
            "attempt": self._facts.attempt,
        }
        for writer in self._writers:
            writer.memory(row)

    def close(self) -> None:
        """Flush and close the writers."""
        self.flush()
        for writer in self._writers:
            writer.close()

    def _row(
        self, one: Iteration, numbers: dict[str, float], memory: int, layers: list[LayerRow]
    ) -> dict[str, Any]:
        facts = self._facts
        size, seconds = len(one.samples), one.elapsed_ms / 1e3
        rate = size / seconds if seconds and not one.left_out else None
        flops = None if rate is None else facts.flops_per_sample * rate / facts.world_size
        row: dict[str, Any] = {
            "iteration": one.iteration,
            "consumed_samples": one.consumed_samples,
            "consumed_tokens": one.consumed_samples * facts.seq_length,
        }
        row |= {_key(name): numbers.get(name) for name in one.losses}
        row |= {
            "grad_norm": numbers.get("grad_norm"),
            "learning_rate": numbers["learning_rate"],
            "loss_scale": numbers["loss_scale"],
            "skipped": one.skipped,
            "elapsed_ms": one.elapsed_ms,
            "tokens_per_second": None if rate is None else facts.seq_length * rate,
            "mfu": flops / facts.peak_flops if flops is not None and facts.peak_flops else None,
            "memory_bytes": memory,
            "attempt": facts.attempt,
            "nan": one.nan,
            "global_batch_size": size,
            "first_sample": one.samples.start,
            "last_sample": one.samples.stop - 1,
            "skipped_samples": one.skipped_samples,
            "left_out": one.left_out,
            "throughput": None if flops is None else flops / 1e12,
        }
        for name in ("clipped_grad_norm", "num_zeros", "params_norm", "decoupled_learning_rate"):
            if name in numbers:
                row[name] = numbers[name]
        row |= {_norm_key(name): numbers[_norm_key(name)] for name in one.group_norms}
        if layers:
            row |= expert_loads.summary(layers)
            row["experts"] = layers
        row["loss_names"] = {_key(name): name for name in one.losses}
        row["group_names"] = {_norm_key(name): name for name in one.group_norms}
        return row


def summarise(
    rows: Sequence[Mapping[str, Any]], facts: Facts, show_throughput: bool, first: bool
) -> log_line.Interval:
    """Return what the rows of a log interval amount to.

    The loss is the mean over the iterations that were not skipped. Rates are those of iterations
    that were computed, without the run's first, which pays for warming up, if there are others.
    """
    last = rows[-1]
    trained = [row for row in rows if not row["skipped"]]
    names = {key: name for row in rows for key, name in row["loss_names"].items()}
    losses = {}
    for key, name in names.items():
        values = [row[key] for row in trained if row.get(key) is not None]
        if values:  # an interval that trained on nothing has no loss
            losses[name] = math.fsum(values) / len(values)
    computed = [row for row in rows if not row["left_out"]]
    warm = computed[1:] if first and len(computed) > 1 else computed
    warm_seconds = math.fsum(row["elapsed_ms"] for row in warm) / 1e3
    tokens = sum(row["global_batch_size"] for row in warm) * facts.seq_length
    left = facts.train_iters - last["iteration"]
    zeros = last.get("num_zeros")
    return log_line.Interval(
        iteration=last["iteration"],
        train_iters=facts.train_iters,
        consumed_samples=last["consumed_samples"],
        skipped_samples=last["skipped_samples"],
        elapsed_ms=math.fsum(row["elapsed_ms"] for row in rows) / len(rows),
        learning_rate=last["learning_rate"],
        decoupled_learning_rate=last.get("decoupled_learning_rate"),
        global_batch_size=last["global_batch_size"],
        losses=losses,
        loss_scale=last["loss_scale"],
        grad_norm=last["grad_norm"],
        num_zeros=None if zeros is None else int(zeros),
        params_norm=last.get("params_norm"),
        group_norms={name: last[key] for key, name in last["group_names"].items()},
        experts=_of_experts(computed),
        skipped=len(rows) - len(trained),
        nan=sum(row["nan"] for row in rows),
        throughput=_mean_throughput(warm, facts) if show_throughput and warm else None,
        tokens_per_second=tokens / warm_seconds if warm_seconds else None,
        eta_seconds=warm_seconds / len(warm) * left if warm else None,
        epochs=facts.epochs(last["consumed_samples"]),
    )


def _of_experts(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean load of experts over iterations that counted it."""
    counted = [row for row in rows if "experts" in row]
    if not counted:
        return {}

    def mean(key: str) -> float:
        return math.fsum(row[key] for row in counted) / len(counted)

    named = {
        "expert imbalance": mean("expert_imbalance"),
        "worst expert imbalance": mean("worst_expert_imbalance"),
        "dropped choices": mean("dropped_choices"),
    }
    if "expert_overload" in counted[0]:
        named["expert overload"] = mean("expert_overload")
        named["worst expert overload"] = mean("worst_expert_overload")
    return named


def _mean_throughput(rows: Sequence[Mapping[str, Any]], facts: Facts) -> float:
    samples = sum(row["global_batch_size"] for row in rows)
    seconds = math.fsum(row["elapsed_ms"] for row in rows) / 1e3
    return samples * facts.flops_per_sample / seconds / facts.world_size / 1e12 if seconds else 0.0


def _key(name: str) -> str:
    """Return a loss's key in files: `lm loss` is `lm_loss`."""
    return name.replace(" ", "_")


def _norm_key(group: str) -> str:
    """Return the key in files of the gradient's norm of an optimizer group."""
    return _key(f"grad_norm {group}")


def _to_host(pending: Sequence[Iteration]) -> list[dict[str, float]]:
    """Return every iteration's numbers as floats, with one copy from the device."""
    named: list[dict[str, Number]] = []
    for one in pending:
        numbers: dict[str, Number | None] = {
            "learning_rate": one.learning_rate,
            "decoupled_learning_rate": one.decoupled_learning_rate,
            "loss_scale": one.loss_scale,
            "grad_norm": one.grad_norm,
            "clipped_grad_norm": one.clipped_norm,
            "num_zeros": one.num_zeros,
            "params_norm": one.params_norm,
            **{_norm_key(name): norm for name, norm in one.group_norms.items()},
            **one.losses,
        }
        named.append({name: value for name, value in numbers.items() if value is not None})
    tensors = [
        value.detach().double().reshape(())
        for numbers in named
        for value in numbers.values()
        if isinstance(value, Tensor)
    ]
    copied = iter(torch.stack(tensors).tolist() if tensors else [])
    return [
        {
            name: next(copied) if isinstance(value, Tensor) else float(value)
            for name, value in numbers.items()
        }
        for numbers in named
    ]
