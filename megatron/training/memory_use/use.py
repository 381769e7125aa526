"""What this process holds, by category, and what was planned for it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property

from torch import Tensor

from megatron.core import saved_tensors
from megatron.core.config import Origin
from megatron.core.distributed.buffers import FlatBuffer
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
        self.activations: int | None = None
        """Bytes of them, at most in the last iteration that was `watched`; None: none was."""

    @cached_property
    def planned(self) -> Sequence[RankMemory]:
        """Return the plan of every rank of the pipeline."""
        assert self.padded_rows is not None, "the vocabulary is not known yet"
        return MemoryPlan(self.config, self.padded_rows).ranks()

    def fixed(self) -> dict[str, int]:
        """Return the bytes of weights, gradients, masters and states; nothing before they exist."""
        return {} if self.optimizer is None else self.optimizer.memory()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Count the activations of an iteration, which takes a little time for each of them."""
        with saved_tensors.counting(self._buffers()) as saved:
            yield
        self.activations = saved.most

    def _buffers(self) -> Iterator[Tensor]:
        """Yield tensors in the memory of weights and gradients."""
        for buffer in () if self.optimizer is None else self.optimizer.data_parallel.buffers:
            yield from buffer.weight_pieces
            yield from buffer.grad_pieces
            if isinstance(buffer, FlatBuffer):
                yield from (buffer.data, buffer.grad)
