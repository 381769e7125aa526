"""What a training step, an optimizer and checkpoints ask of whatever makes replicas one.

`data_parallel.DataParallel` does it with flat buffers, `torch_fsdp.TorchFsdp` with torch's
``fully_shard``.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor, nn

from megatron.core.distributed.config import DataParallelConfig
from megatron.core.distributed.pieces import Member, Pieces, Shares
from megatron.core.mesh import Mesh


class Replicas(Protocol):
    """The weights and gradients of a rank's chunks of a model, and what replicas do with them.

    Gradients are sums over the samples of all replicas, divided by ``divisor``: 1, but the number
    of replicas where they travel in fp16.
    """

    shares: Shares
    expert_shares: Shares
    divisor: int

    @property
    def buffers(self) -> Sequence[Pieces]:
        """Return what this rank keeps and updates; replicas and optimizer groups share it out."""
        ...

    def zero_grad(self) -> None:
        """Set all gradients to zero."""
        ...

    def begin(self, chunk: int, kind: str, last: bool) -> None:
        """Expect gradients of a chunk's parameters.

        Args:
            chunk: its number.
            kind: ``backward``, or one of its parts ``backward_input``, ``backward_weight``.
            last: no more gradients of this chunk come in this iteration.
        """
        ...

    def finish(self, chunk: int, kind: str, last: bool) -> None:
        """Take note that the gradients that `begin` announced are there."""
        ...

    def reduce_gradients(self) -> None:
        """Sum all gradients over the replicas and over the axes their regions name."""
        ...

    def publish_weights(self) -> None:
        """Let every rank have the weights that others updated; a collective of the replicas.

        They may be on their way still: `settle` waits.
        """
        ...

    def settle(self) -> None:
        """Return once all weights that this rank keeps are there."""
        ...

    def whole_parameters(self) -> Iterator[nn.Parameter]:
        """Yield `parameters`, each with all of its weights there until the next is asked for.

        A collective of those who share weights.
        """
        ...

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return all parameters of the chunks, each once and in one order, with their records."""
        ...

    def gradients(self) -> Iterator[tuple[Member, Tensor]]:
        """Yield what this rank has of each parameter's reduced gradient, as flat views."""
        ...

    def weights(self) -> Iterator[tuple[Member, Tensor]]:
        """Yield what this rank updates of each parameter, as flat views."""
        ...


def shares_of(config: DataParallelConfig, mesh: Mesh) -> Shares:
    """Return what the replicas of a mesh share out of the dense layers."""
    if config.shares(mesh.dp_cp.size) == 1:  # nobody to share with
        return Shares("no_shard", mesh.alone, mesh.dp_cp)
    return Shares(config.data_parallel_sharding_strategy, mesh.dp_inner, mesh.dp_outer)


def shares_of_experts(config: DataParallelConfig, mesh: Mesh) -> Shares:
    """Return what the replicas of experts share out, if those of the dense layers share anything.

    One replica has nobody to share with, nor has one that is alone in its instance.
    """
    if shares_of(config, mesh).axis.size == 1 or mesh.edp_inner.size == 1:
        return Shares("no_shard", mesh.alone, mesh.edp)
    return Shares(config.data_parallel_sharding_strategy, mesh.edp_inner, mesh.edp_outer)
