"""One training iteration, from microbatches to new weights.

    passes               -> forward and backward of each microbatch, gradients add up
    gradients            -> summed over replicas
    sums over the world  -> loss, valid tokens, reasons to stop
    optimizer            -> one scale for denominator and clipping, update
    routers              -> biases of experts, where there are, if weights were updated

A batch without a valid token, and one whose loss or gradient is not finite or whose loss is a
spike that is looked for, leaves weights and biases as they are. What happens then is
`health`'s to say.

Backward starts from the loss of a replica, a mean over its tokens, times a loss scale, so that what
fp16 can hold of it does not depend on how many replicas there are. The optimizer's one scale takes
both out again.
Gradients that overflow under a dynamic one (--fp16) tell it to fall, and the step is left out on
all ranks. That is no fault of the run, unless the scale cannot fall any further or the loss itself
is not finite: no scale reaches into the forward pass.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron.core import comm
from megatron.core.distributed.replicas import Replicas
from megatron.core.mesh import Mesh
from megatron.core.optimizer.optimizer import Optimizer, Update
from megatron.core.precision.loss_scaler import LossScaler
from megatron.core.rng import DropoutKey
from megatron.core.transformer.moe.router import update_expert_biases
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
    decoupled_learning_rate: float | None = None
    """Of embedding and output head, where they have their own."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What an iteration amounted to."""

    totals: Totals
    grad_norm: float | Tensor | None
    """Before clipping; None where there is none worth a look: of a loss that is not finite, and of
    an overflow."""
    clipped_norm: float | Tensor | None = None
    """After clipping; there where `grad_norm` is."""
    num_zeros: float | Tensor | None = None
    group_norms: Mapping[str, Tensor] = field(default_factory=dict)
    """Of the gradient, by optimizer group; when asked for."""
    skipped: bool = False
    """The weights were left as they are."""
    nan: bool = False
    """Because a loss or gradient was not finite."""
    overflow: bool = False
    """Because gradients overflowed, which a smaller loss scale may cure."""


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
        group_norms: bool = False,
        empty_unused: Callable[[int], None] = lambda level: None,
        before_update: Callable[[], None] = lambda: None,
    ) -> None:
        self.passes, self.optimizer, self.health = passes, optimizer, health
        self.objective, self.timers = passes.objective, passes.timers
        self.mesh: Mesh = passes.mesh
        self.seed, self.count_zeros, self.group_norms = seed, count_zeros, group_norms
        self.empty_unused, self.before_update = empty_unused, before_update

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
        divisor = self.divisor(nominal)
        with self.timers.measure("forward-backward"):
            self.passes.train(
                microbatches,
                count,
                sums,
                divisor=divisor,
                key_of=functools.partial(self._key, plan.iteration),
                before_gradients=replicas.begin,
                after_gradients=replicas.finish,
            )
        with self.timers.measure("all-reduce-gradients"):
            replicas.reduce_gradients()
        with self.timers.measure("all-reduce-totals", level=2):
            totals = sums.reduce(seen())
        self.empty_unused(1)
        if not totals.is_finite:
            what = _where(totals)
            if self.optimizer.scaler.is_dynamic:
                # The gradients are no more finite than the loss. That ends a row of steps without
                # an overflow, as in Megatron-LM, although a smaller scale is no cure.
                self.optimizer.scaler.update(overflow=True)
                what += " (fp16 ends at 65504, which is no matter of the loss scale; try --bf16)"
            self.health.non_finite(what, plan.iteration, plan.samples)
            return StepResult(totals=totals, grad_norm=None, skipped=True, nan=True)
        if totals.tokens == 0:
            return StepResult(totals=totals, grad_norm=None, skipped=True)
        self.health.check_spike(totals.loss, plan.iteration, plan.samples)
        scale, norms = divisor * replicas.divisor / totals.denominator, {}
        self.before_update()
        with self.timers.measure("optimizer"):
            if self.group_norms:
                norms = self.optimizer.norms.by_group(scale)
            update = self.optimizer.step(
                scale,
                lr=plan.learning_rate,
                weight_decay=plan.weight_decay,
                decoupled_lr=plan.decoupled_learning_rate,
                count_zeros=self.count_zeros,
            )
        if update.updated:  # weights and biases of an iteration belong together
            update_expert_biases(self.passes.chunks)
        self.empty_unused(2)
        return self._judge(plan, totals, update, norms)

    def divisor(self, nominal: float) -> float:
        """Return what losses are divided by before backward.

        Args:
            nominal: denominator of the objective when every token is valid.
        """
        return nominal / (self.mesh.dp_cp.size * self.optimizer.scaler.scale)

    def _key(self, iteration: int, index: int) -> DropoutKey:
        # Microbatches as sets of samples are numbered alike on every layout: replicas take turns.
        number = index * self.mesh.dp.size + self.mesh.dp.coordinate
        return DropoutKey(self.seed, iteration, number, self.mesh.cp.coordinate)

    def _judge(
        self, plan: Plan, totals: Totals, update: Update, group_norms: Mapping[str, Tensor]
    ) -> StepResult:
        """Let the scaler and `health` look at an update that the optimizer made or refused."""
        scaler, refused = self.optimizer.scaler, not update.updated
        overflow = refused and scaler.can_fall
        # The norm is the world's, so all ranks are alike here.
        what = self._blame(update) if refused and not overflow else ""
        scaler.update(overflow=refused)
        if what:
            self.health.non_finite(what, plan.iteration, plan.samples)
        elif not refused:
            self.health.finite(totals.loss)
        return StepResult(
            totals=totals,
            grad_norm=None if overflow else update.grad_norm,
            clipped_norm=None if overflow else update.clipped_norm,
            num_zeros=None if overflow else update.num_zeros,
            group_norms={} if overflow else group_norms,
            skipped=refused,
            nan=refused and not overflow,
            overflow=overflow,
        )

    def _blame(self, update: Update) -> str:
        """Return which gradients are not finite; a collective, as each rank has its own."""
        mine = non_finite_gradients(self.optimizer.data_parallel)[: SHOWN + 1]
        everyone = comm.gather_objects(mine, self.mesh.world)
        names = list(dict.fromkeys(itertools.chain.from_iterable(everyone)))
        what = f"gradient norm is {float(update.grad_norm)} although the loss is finite"
        if names:
            more = " ..." if names[SHOWN:] else ""
            what += f" (not finite: {', '.join(names[:SHOWN])}{more})"
        else:
            what += " (every element is finite, and the sum of their squares is not)"
        return what + _of_scale(self.optimizer.scaler)


def non_finite_gradients(replicas: Replicas) -> list[str]:
    """Return the names of parameters of whose gradient this rank has an element not finite."""
    found = [
        member.record.name
        for member, grad in replicas.gradients()
        if not bool(torch.isfinite(grad).all())
    ]
    return list(dict.fromkeys(found))


def _of_scale(scaler: LossScaler) -> str:
    """Return what the loss scale has to do with a gradient that is not finite."""
    if scaler.is_dynamic:
        return f"; the loss scale ({scaler.scale:g}) is at --min-loss-scale and falls no further"
    if scaler.scale != 1:
        return (
            f"; the loss is multiplied by --loss-scale {scaler.scale:g}: try less, or --fp16 "
            "without --loss-scale, which finds one"
        )
    return ""


def _where(totals: Totals) -> str:
    numerators = (totals.numerator, *totals.auxiliary.values())
    value = "nan" if any(map(math.isnan, numerators)) else "infinite"
    count = round(totals.bad_ranks)
    if count == 1:
        return f"loss is {value} on rank {round(totals.bad_rank)}"
    return f"loss is {value}" + (f" on {count} ranks" if count else "")
