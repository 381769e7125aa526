"""The training loop: which iteration comes next, and what happens after it.

    while iterations are left:
        plan the iteration          samples, rates
        train on it, or leave it out
        log, evaluate, save         each when due
        stop?                       all ranks decide alike

One iteration is in `step`; the parts are made and joined in `pretrain`.
"""

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta

from megatron.core.utils import Say
from megatron.training import memory
from megatron.training.batches import Batches, NoBatches
from megatron.training.checkpoints.saver import Saver
from megatron.training.config import RunConfig
from megatron.training.evaluation import LOSS, HeldOut
from megatron.training.external import ExternalBatches
from megatron.training.failing.heartbeat import Pulse
from megatron.training.garbage import Garbage
from megatron.training.planner import Planned, Planner
from megatron.training.processes import setup
from megatron.training.profiling import Profiler
from megatron.training.records import log_line
from megatron.training.records.metrics import Iteration, Metrics
from megatron.training.replica_check import ReplicaCheck
from megatron.training.state import TrainState
from megatron.training.step import Plan, StepResult, TrainStep
from megatron.training.stopping import Reason, Stopper
from megatron.training.timers import across_ranks, timers_block

MEMORY_SHOWN_AFTER = 2
"""Iterations after which memory is printed: the second has all buffers of the first."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the loop works with."""

    step: TrainStep
    batches: Batches | ExternalBatches | NoBatches
    planner: Planner
    train_iters: int
    held_out: HeldOut
    metrics: Metrics
    stopper: Stopper
    profiler: Profiler
    garbage: Garbage
    replica_check: ReplicaCheck | None
    report_memory: Callable[[int], None]
    """Tells what memory is held after an iteration; a collective of the world."""
    watch_memory: Callable[[], AbstractContextManager[None]]
    """Counts what comes and goes in an iteration that is reported."""
    pulse: Pulse
    saver: Saver | None
    """None when nothing is saved."""
    say: Say
    flops_per_sample: float


class Trainer:
    """Runs iterations until the run is complete or has a reason to stop."""

    def __init__(self, config: RunConfig, parts: Parts, state: TrainState) -> None:
        self.config, self.parts, self.state = config, parts, state
        self.mesh, self.timers = parts.step.mesh, parts.step.timers
        self.skipped = frozenset(config.training.iterations_to_skip)
        self._started = state.iteration
        self._seconds = 0.0
        """Wall time of this process's iterations."""
        self._warned = False
        self._warned_of_nothing = False
        """In this log interval: an iteration had no token that counts."""
        self._on_first: Callable[[float], None] = lambda seconds: None

    def train(self, on_first: Callable[[float], None] | None = None) -> Reason:
        """Train to the end, or to a reason to stop; return which.

        Args:
            on_first: told the seconds of the first iteration, when it is done.

        Raises:
            RunFailed: the run has gone wrong; nothing was saved for it.
        """
        self._on_first = on_first or self._on_first
        self.parts.garbage.start()
        try:
            while self.state.iteration < self.parts.train_iters:
                reason = self._iterate()
                if reason is not None:
                    return reason
            return "complete"
        finally:
            self.parts.garbage.stop()
            self.parts.metrics.flush()
            self._say(self.parts.profiler.stop())

    def _iterate(self) -> Reason | None:
        """Run one iteration and what is due after it."""
        planned = self.parts.planner.after(self.state)
        plan = planned.plan
        self.parts.pulse.timed(f"iteration {plan.iteration}")
        self.parts.profiler.before(plan.iteration)
        start = time.perf_counter()
        if plan.iteration in self.skipped:
            result = self._leave_out(planned)
        else:
            result = self._train_on(planned)
        seconds = time.perf_counter() - start
        self.parts.pulse.untimed(f"the end of iteration {plan.iteration}")
        self._count(plan, seconds)
        self._record(plan, result, seconds)
        if self.parts.replica_check is not None:
            self.parts.replica_check.after(plan.iteration)
        self._warn_of_nothing(plan, result)
        self._say(self.parts.profiler.after(plan.iteration))
        self._log_when_due()
        self._evaluate_when_due()
        self.parts.garbage.iteration(plan.iteration)
        reason = self.parts.stopper.reason(plan.iteration, result.totals.stop)
        if plan.iteration == self.parts.train_iters:
            reason = "complete"
        self._save_when_due(stopping=reason is not None)
        if reason == "stop file" and self.mesh.rank == 0:
            self.parts.stopper.obey()
        return reason

    def _train_on(self, planned: Planned) -> StepResult:
        plan, count, nominal = planned
        microbatches = self.parts.batches.take(count)
        reported = self._memory_is_reported(plan.iteration)
        with self.parts.watch_memory() if reported else nullcontext():
            return self.parts.step.run(plan, microbatches, count, nominal, self.parts.stopper.seen)

    def _memory_is_reported(self, iteration: int) -> bool:
        interval = self.config.logging.log_memory_interval
        return interval is not None and iteration % interval == 0

    def _leave_out(self, planned: Planned) -> StepResult:
        """Consume the samples of an iteration without training on them."""
        self.state.skipped_samples += len(planned.plan.samples)
        self.parts.batches.leave_out(planned.microbatches)
        totals = self.parts.step.passes.accumulator().reduce(self.parts.stopper.seen())
        return StepResult(totals=totals, grad_norm=None, skipped=True)

    def _count(self, plan: Plan, seconds: float) -> None:
        self.state.iteration = plan.iteration
        self.state.consumed_samples += len(plan.samples)
        if plan.iteration not in self.skipped:
            self.state.flops += self.parts.flops_per_sample * len(plan.samples)
        self._seconds += seconds
        if plan.iteration == self._started + 1:
            self._on_first(seconds)
            limit = self.config.process.distributed_timeout_seconds_after_init
            if limit is not None:
                self.mesh.limit_waiting(timedelta(seconds=limit) + setup.MARGIN)
                self.parts.pulse.limit = limit

    def _record(self, plan: Plan, result: StepResult, seconds: float) -> None:
        norm = None
        if self.config.logging.log_params_norm:
            norm = self.parts.step.optimizer.norms.weights()
        self.parts.metrics.add(
            Iteration(
                iteration=plan.iteration,
                consumed_samples=self.state.consumed_samples,
                skipped_samples=self.state.skipped_samples,
                samples=plan.samples,
                learning_rate=plan.learning_rate,
                decoupled_learning_rate=plan.decoupled_learning_rate,
                losses={LOSS: result.totals.loss, **result.totals.auxiliary_losses},
                grad_norm=result.grad_norm,
                clipped_norm=result.clipped_norm,
                num_zeros=result.num_zeros,
                group_norms=result.group_norms,
                params_norm=norm,
                loss_scale=self.parts.step.optimizer.scaler.scale,
                skipped=result.skipped,
                nan=result.nan,
                left_out=plan.iteration in self.skipped,
                loads=None if plan.iteration in self.skipped else result.totals.loads,
                elapsed_ms=1e3 * seconds,
            )
        )

    def _warn_of_nothing(self, plan: Plan, result: StepResult) -> None:
        """Tell, once in a log interval, of an iteration without a token that counts."""
        no_fault = result.skipped and not (result.nan or result.overflow)
        nothing = no_fault and plan.iteration not in self.skipped
        if nothing and not self._warned_of_nothing:
            self._warned_of_nothing = True
            self._say(
                f"warning: no token of iteration {plan.iteration} counts, so nothing was trained "
                "and it is a skipped iteration: is the corpus all end tokens (--eod-mask-loss) or "
                "padding?"
            )

    def _log_when_due(self) -> None:
        iteration, interval = self.state.iteration, self.config.logging.log_interval
        if iteration - self._started == MEMORY_SHOWN_AFTER:
            report = memory.report(self.mesh.device)
            self._say(log_line.memory_line(self.mesh.rank, iteration, report))
        if self._memory_is_reported(iteration):
            self.parts.report_memory(iteration)
        if iteration % interval:
            return
        self.parts.metrics.print_line()
        self._warned_of_nothing = False
        self.parts.profiler.snapshot()
        self._show_timers(min(interval, iteration - self._started))
        if not self._warned:
            warning = self.parts.stopper.warning(self._seconds_to_next_save(), os.environ)
            self._warned = warning is not None
            self._say(warning)

    def _show_timers(self, iterations: int) -> None:
        if not self.timers.seconds:  # the same timers run on all ranks
            return
        by_rank = across_ranks(self.timers.take(), self.mesh.world)
        self._say(timers_block(by_rank, self.config.logging.timing_log_option, iterations))
        slowest = {name: max(values) / iterations for name, values in by_rank.items()}
        self.parts.metrics.timers(self.state.iteration, self.state.consumed_samples, slowest)

    def _seconds_to_next_save(self) -> float | None:
        interval = self.config.checkpoint.save_interval
        if self.parts.saver is None:
            return None
        left = self.parts.train_iters - self.state.iteration
        if interval is not None:
            left = min(left, interval - self.state.iteration % interval)
        return left * self._seconds / (self.state.iteration - self._started)

    def _evaluate_when_due(self) -> None:
        validation, iteration = self.config.validation, self.state.iteration
        if validation.eval_interval is None or iteration % validation.eval_interval:
            return
        if not self.parts.held_out.validates:
            return
        if validation.start_eval_at_iter is None or iteration >= validation.start_eval_at_iter:
            start = time.perf_counter()
            self.parts.pulse.timed(f"the evaluation after iteration {iteration}")
            self.parts.held_out.validate(self.state)
            self.parts.pulse.untimed(f"the end of iteration {iteration}")
            self._show_duration("evaluate", time.perf_counter() - start)

    def _save_when_due(self, stopping: bool) -> None:
        interval, iteration = self.config.checkpoint.save_interval, self.state.iteration
        due = interval is not None and iteration % interval == 0
        saver = self.parts.saver
        if saver is None:
            return
        often = self.config.checkpoint.recovery.non_persistent_save_interval
        recovers = not (due or stopping) and often is not None and iteration % often == 0
        if not (due or stopping or recovers):
            saver.look()
            return
        self.parts.metrics.flush()
        self.parts.pulse.untimed(f"saving iteration {iteration}")
        start = time.perf_counter()
        if recovers:
            saver.recover(self.state)
        else:
            saver.save(self.state, stopping)
        seconds = time.perf_counter() - start
        # The last save may have to wait for one that is under way.
        saves = 2 if self.config.checkpoint.speed.async_save else 1
        self.parts.stopper.saved(max(seconds, saves * saver.longest))
        self._show_duration("save-checkpoint", seconds)

    def _show_duration(self, name: str, seconds: float) -> None:
        by_rank = across_ranks({name: seconds}, self.mesh.world)
        self._say(timers_block(by_rank, self.config.logging.timing_log_option, 1))

    def _say(self, line: str | None) -> None:
        if line:
            self.parts.say(line)
