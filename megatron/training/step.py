"""One training iteration, from microbatches to new weights.

    passes               -> forward and backward of each microbatch, gradients add up
    gradients            -> summed over replicas
    sums over the world  -> loss, valid tokens, reasons to stop
    optimizer            -> one scale for denominator and clipping, update

A batch without a valid token, and one whose loss or gradient is not finite or whose loss is a
spike that is looked for, leaves the weights as they are. What happens then is `health`'s to say.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.core import comm, sharding
from megatron.core.mesh import Mesh
from megatron.core.optimizer.optimizer import Optimizer, Update
from megatron.core.rng import DropoutKey
from megatron.training.batches import Batch
from megatron.training.health import Health
from megatron.training.objective import Totals
from megatron.training.passes import Passes

SHOWN = 3
"""Names of parameters that a message shows."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is known of an iteration before it runs."""

    iteration: int
    """From 1."""
    samples: range
    """Numbers of the samples of the global batch."""
    learning_rate: float
    weight_decay: float


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What an iteration amounted to."""

    totals: Totals
    grad_norm: float | Tensor | None
    num_zeros: float | Tensor | None = None
    skipped: bool = False
    """The weights were left as they are."""
    nan: bool = False
    """Because a loss or gradient was not finite."""


class TrainStep:
    """Runs iterations of one model and its optimizer."""

    def __init__(
        self,
        passes: Passes,
        optimizer: Optimizer,
        health: Health,
        *,
        seed: int,
        count_zeros: bool = False,
    ) -> None:
        self.passes, self.optimizer, self.health = passes, optimizer, health
        self.objective, self.timers = passes.objective, passes.timers
        self.mesh: Mesh = passes.mesh
        self.seed, self.count_zeros = seed, count_zeros

    def run(
        self,
        plan: Plan,
        microbatches: Iterable[Batch],
        count: int,
        nominal: float,
        seen: Callable[[], tuple[bool, bool, bool]],
    ) -> StepResult:
        """Train on one global batch.

        Args:
            plan: number, samples and rates of the iteration.
            microbatches: this rank's, in order.
            count: how many.
            nominal: denominator of the objective when every token is valid.
            seen: tells this rank's reasons to stop; asked after the last backward.

        Raises:
            RunFailed: `health` ends the run.
        """
        self.optimizer.zero_grad()
        sums, replicas = self.passes.accumulator(), self.optimizer.data_parallel
        with self.timers.measure("forward-backward"):
            self.passes.train(
                microbatches,
                count,
                sums,
                nominal=nominal,
                key_of=functools.partial(self._key, plan.iteration),
                before_last_backward=replicas.begin,
                after_last_backward=replicas.finish,
            )
        with self.timers.measure("all-reduce-gradients"):
            replicas.reduce_gradients()
        with self.timers.measure("all-reduce-totals", level=2):
            totals = sums.reduce(seen())
        if not totals.is_finite:
            self.health.non_finite(_where(totals), plan.iteration, plan.samples)
            return StepResult(totals=totals, grad_norm=None, skipped=True, nan=True)
        if totals.tokens == 0:
            return StepResult(totals=totals, grad_norm=None, skipped=True)
        self.health.check_spike(totals.loss, plan.iteration, plan.samples)
        with self.timers.measure("optimizer"):
            update = self.optimizer.step(
                nominal / totals.denominator,
                lr=plan.learning_rate,
                weight_decay=plan.weight_decay,
                count_zeros=self.count_zeros,
            )
        return self._judge(plan, totals, update)

    def _key(self, iteration: int, index: int) -> DropoutKey:
        # Microbatches as sets of samples are numbered alike on every layout: replicas take turns.
        number = index * self.mesh.dp.size + self.mesh.dp.coordinate
        return DropoutKey(self.seed, iteration, number, self.mesh.cp.coordinate)

    def _judge(self, plan: Plan, totals: Totals, update: Update) -> StepResult:
        """Let `health` look at an update that the optimizer has made or refused."""
        nan = not update.updated
        if nan:
            # The norm is the world's, so all ranks are here; each has parameters of its own.
            mine = non_finite_gradients(self.passes.chunks)[: SHOWN + 1]
            everyone = comm.gather_objects(mine, self.mesh.world)
            names = list(dict.fromkeys(itertools.chain.from_iterable(everyone)))
            what = f"gradient norm is {float(update.grad_norm)} although the loss is finite"
            if names:
                more = " ..." if names[SHOWN:] else ""
                what += f" (not finite: {', '.join(names[:SHOWN])}{more})"
            self.health.non_finite(what, plan.iteration, plan.samples)
        else:
            self.health.finite(totals.loss)
        return StepResult(
            totals=totals,
            grad_norm=update.grad_norm,
            num_zeros=update.num_zeros,
            skipped=nan,
            nan=nan,
        )


def non_finite_gradients(chunks: Iterable[nn.Module]) -> list[str]:
    """Return the names of parameters whose gradient has an element that is not finite."""
    return [
        sharding.of(parameter).name
        for chunk in chunks
        for parameter in chunk.parameters()
        if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all())
    ]


def _where(totals: Totals) -> str:
    numerators = (totals.numerator, *totals.auxiliary.values())
    value = "nan" if any(map(math.isnan, numerators)) else "infinite"
    count = round(totals.bad_ranks)
    if count == 1:
        return f"loss is {value} on rank {round(totals.bad_rank)}"
    return f"loss is {value}" + (f" on {count} ranks" if count else "")
