"""What would lower the memory of a run, and by how much: other settings of it, planned.

Each choice is a few flags more; the plan is made anew with them, so that what they save is known to
the byte for weights, gradients and states. Choices that do not go together with the run are left
out. Nothing here imports torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.config import Origin
from megatron.core.distributed.config import STRATEGIES
from megatron.core.precision import moments
from megatron.core.utils import UserError, divisors, human_bytes
from megatron.training.arguments import build_run
from megatron.training.config import RunConfig
from megatron.training.plan.memory import MemoryPlan

Origins = Mapping[str, Origin]
SHOWN = 6
"""Choices that are named."""
MOST_TIMES_AS_MANY = 64
"""Replicas that are looked at, as a multiple of those of the run; by powers of two."""


_SHARED = {"data_parallel_sharding_strategy"}


@dataclass(frozen=True)
class Choice:
    """Settings that a run could have besides."""

    flags: str
    """As one writes them."""
    values: Mapping[str, Any]
    """By name."""
    total: int
    """Bytes of the fullest rank at its fullest moment."""


class Savings:
    """Looks for settings with which a run needs less memory.

    Args:
        config: the run.
        origins: where each of its values comes from.
        padded_rows: rows of the vocabulary, padding included.
    """

    def __init__(self, config: RunConfig, origins: Origins, padded_rows: int) -> None:
        self._config, self._origins, self._rows = config, origins, padded_rows
        self.total = self._total(config)

    def lines(self, memory: float) -> Iterator[str]:
        """Yield what would lower the memory of the fullest rank, and what would fit.

        Args:
            memory: bytes of a rank.
        """
        choices = self.choices(memory)
        if choices:
            yield f"the fullest rank has {human_bytes(self.total)}; what would lower that:"
        for choice in choices[:SHOWN]:
            fits = ", which fits" if choice.total <= memory else ""
            yield f"  {choice.flags}: {self._gain(choice)}{fits}"
        together = self.together(choices, memory)
        if together is not None and together.total <= memory:
            if together not in choices:
                yield f"together they fit: {together.flags} ({self._gain(together)})"
            return
        others = [choice for choice in choices if not choice.values.keys() & _SHARED]
        for besides in (None, self.together(others, 0)):
            more = self.on_more_processes(besides, memory)
            if more is not None:
                also = f" and {besides.flags}" if besides is not None else ""
                yield f"it fits on {more.flags}{also} ({human_bytes(more.total)} each)"
                return

    def _gain(self, choice: Choice) -> str:
        saved = human_bytes(self.total - choice.total)
        return f"saves {saved}, leaves {human_bytes(choice.total)}"

    def choices(self, memory: float) -> list[Choice]:
        """Return what each choice alone leaves, the least first; those that save nothing left out.

        Args:
            memory: bytes of a rank; only choices of more than one size look at it.
        """
        found = [self._planned(*choice) for choice in self._single(memory)]
        useful = {choice.flags: choice for choice in found if choice and choice.total < self.total}
        return sorted(useful.values(), key=lambda choice: choice.total)

    def together(self, choices: Sequence[Choice], memory: float) -> Choice | None:
        """Return choices that go together: as few of the first ones as fit, or all; None if none.

        Args:
            choices: by preference.
            memory: bytes of a rank.
        """
        best: Choice | None = None
        for choice in choices:
            if best is None:
                best = choice
            elif not choice.values.keys() & best.values.keys():
                values = {**best.values, **choice.values}
                best = self._planned(f"{best.flags} {choice.flags}", values) or best
            if best.total <= memory:
                break
        return best

    def on_more_processes(self, besides: Choice | None, memory: float) -> Choice | None:
        """Return the fewest processes on which replicas that share all out fit, None if none do.

        Args:
            besides: other choices.
            memory: bytes of a rank.
        """
        strategy = STRATEGIES[-1]
        values = {**(besides.values if besides else {}), **dict.fromkeys(_SHARED, strategy)}
        times = 2
        while times <= MOST_TIMES_AS_MANY:
            world = times * self._config.process.world_size
            flags = f"{world} processes with --data-parallel-sharding-strategy {strategy}"
            planned = self._planned(flags, {**values, "world_size": world})
            if planned is not None and planned.total <= memory:
                return planned
            times *= 2
        return None

    def _total(self, config: RunConfig) -> int:
        return max(rank.total for rank in MemoryPlan(config, self._rows).ranks())

    def _planned(self, flags: str, values: Mapping[str, Any]) -> Choice | None:
        """Return a choice with its plan, None if it does not go together with the run."""
        flat = self._config.flatten()
        kept = {n: value for n, value in flat.items() if self._origins[n] != "derived"}
        origins: dict[str, Origin] = {**self._origins, **dict.fromkeys(values, "flag")}
        try:
            config = build_run({**kept, **values}, origins)
        except UserError:
            return None
        return Choice(flags, values, self._total(config))

    def _single(self, memory: float) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield flags and values that may save something."""
        config, model = self._config, self._config.model
        replicas = config.data_parallel_size * config.parallel.context_parallel_size
        now = STRATEGIES.index(config.replicas.data_parallel_sharding_strategy)
        for strategy in STRATEGIES[now + 1 :] if replicas > 1 else ():
            values = {"data_parallel_sharding_strategy": strategy}
            yield f"--data-parallel-sharding-strategy {strategy}", values
        if model.recompute.granularity is None:
            yield "--recompute-granularity selective", {"recompute_granularity": "selective"}
        if model.recompute.granularity != "full":
            whole = {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            }
            flags = " ".join(f"--{name.replace('_', '-')} {v}" for name, v in whole.items())
            yield flags, {**whole, "recompute_activations": False, "recompute_modules": None}
        smaller = self._smaller_micro_batch(memory)
        if smaller is not None:
            yield f"--micro-batch-size {smaller}", {"micro_batch_size": smaller}
        yield from self._formats()

    def _smaller_micro_batch(self, memory: float) -> int | None:
        """Return the largest smaller micro-batch that fits, 1 if none does."""
        training = self._config.training
        share = self._config.batch_sizes.final // self._config.data_parallel_size
        sizes = [size for size in divisors(share) if size < training.micro_batch_size]
        for size in sorted(sizes, reverse=True):
            planned = self._planned("", {"micro_batch_size": size})
            if planned is not None and planned.total <= memory:
                return size
        return min(sizes, default=None)

    def _formats(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield shorter formats of numbers, and what the host can hold."""
        precision, optimizer = self._config.precision, self._config.optimizer
        if precision.params_dtype == "float32":
            yield "--bf16", {"bf16": True}
        if optimizer.optimizer == "adam" and not precision.use_precision_aware_optimizer:
            short = {
                "exp_avg_dtype": moments.shortest(optimizer.adam_beta1),
                "exp_avg_sq_dtype": moments.shortest(optimizer.adam_beta2),
            }
            short = {name: kind for name, kind in short.items() if kind != "fp32"}
            flags = [f"--{name.replace('_', '-')} {kind}" for name, kind in short.items()]
            if precision.bf16 and short:
                yield (
                    " ".join(("--use-precision-aware-optimizer", *flags)),
                    {"use_precision_aware_optimizer": True, **short},
                )
        if self._config.process.device != "cpu" and not optimizer.optimizer_cpu_offload:
            yield "--optimizer-cpu-offload", {"optimizer_cpu_offload": True}
