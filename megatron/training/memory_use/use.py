"""What this process holds, by category, and what was planned for it."""

from collections.abc import Mapping, Sequence
from functools import cached_property

from megatron.core.config import Origin
from megatron.core.held import Held
from megatron.core.mesh import Mesh
from megatron.core.optimizer.optimizer import Optimizer
from megatron.training.checkpoints.saver import Saver
from megatron.training.config import RunConfig
from megatron.training.plan.memory import MemoryPlan, RankMemory


class MemoryUse:
    """The memory of one process of a run, as far as its buffers and its plan tell.

    Args:
        config: the run.
        mesh: axes and device.
    """

    origins: Mapping[str, Origin] | None = None
    """Where each value of the run comes from; None: nobody said."""
    padded_rows: int | None = None
    """Rows of the vocabulary; None: not known yet."""
    optimizer: Optimizer | None = None
    """None before it is built, and where there is only evaluation."""
    saver: Saver | None = None
    """None where nothing is saved."""

    def __init__(self, config: RunConfig, mesh: Mesh) -> None:
        self.config, self.mesh = config, mesh
        self.passing = Held()
        """What is there for communication."""

    @cached_property
    def planned(self) -> Sequence[RankMemory]:
        """Return the plan of every rank of the pipeline."""
        assert self.padded_rows is not None, "the vocabulary is not known yet"
        return MemoryPlan(self.config, self.padded_rows).ranks()

    def fixed(self) -> dict[str, int]:
        """Return the bytes of weights, gradients, masters and states; nothing before they exist."""
        return {} if self.optimizer is None else self.optimizer.memory()
