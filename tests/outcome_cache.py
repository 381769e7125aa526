"""Outcomes of small runs on a worker pool, each made once."""

from megatron.training.config import RunConfig
from megatron.training.verification import equality
from megatron.training.verification.outcomes import Outcome
from tests.harness import Pool
from tools.verify_layout import case


class OutcomeCache:
    """Runs what was not run before."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._made: dict[str, Outcome] = {}

    def of(self, config: RunConfig) -> Outcome:
        """Return the outcome of a run."""
        if repr(config) not in self._made:
            self._made[repr(config)] = equality.run(self.pool, case(config))
        return self._made[repr(config)]
