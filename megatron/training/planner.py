"""What is known of an iteration before it runs: its samples, its rates, its microbatches.

All of it follows from how far the run has come, so that a resumed run goes on as it would have.
"""

from typing import NamedTuple

from megatron.core.mesh import Mesh
from megatron.core.optimizer.schedule import Schedule
from megatron.training.build import build_objective
from megatron.training.config import RunConfig
from megatron.training.state import TrainState
from megatron.training.step import Plan


class Planned(NamedTuple):
    """One iteration, as `TrainStep.run` wants it."""

    plan: Plan
    microbatches: int
    """Of this rank."""
    nominal: float
    """What the loss is divided by if every token counts."""


class Planner:
    """Plans the iterations of a run on one rank.

    Args:
        config: the run.
        mesh: its axes.
        schedule: of the rates; the config's own when absent. A checkpoint's may be another one.
    """

    def __init__(self, config: RunConfig, mesh: Mesh, schedule: Schedule | None = None) -> None:
        self._micro, self._replicas = config.training.micro_batch_size, mesh.dp.size
        self._sizes, self._length = config.batch_sizes, config.target_positions
        self._schedule = schedule or config.learning_schedule
        self._objective = build_objective(config, mesh)

    def after(self, state: TrainState) -> Planned:
        """Return the iteration that follows when a run has come as far as ``state``."""
        size = self._sizes.at(state.consumed_samples)
        rates = self._schedule.rates(state.progress)
        plan = Plan(
            iteration=state.iteration + 1,
            samples=range(state.consumed_samples, state.consumed_samples + size),
            learning_rate=rates.lr,
            weight_decay=rates.weight_decay,
            decoupled_learning_rate=rates.decoupled_lr,
        )
        count = size // (self._micro * self._replicas)
        return Planned(plan, count, self._objective.nominal(size, self._micro, self._length))
