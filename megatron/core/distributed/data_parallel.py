"""Data parallelism: every replica ends with the same sum of all replicas' gradients.

The gradients of a model chunk lie in flat buffers, cut into buckets; a bucket is summed over the
replicas by one collective. Buckets are launched in one static order, equal on all ranks, by
`DataParallel.reduce_gradients` after the last backward. Nothing overlaps with it yet: linear and
embedding layers would call ``parameter.grad_ready(parameter)`` after each microbatch's share, but
nobody sets that attribute, and gradients that autograd itself adds (norms) are not reported.

    once per iteration    all-reduce of each bucket over dp x cp, then sums of regions (`finalize`)
"""

from collections.abc import Iterable

import torch
from torch import nn

from megatron.core import comm, sharding
from megatron.core.distributed import finalize
from megatron.core.distributed.buffers import FlatBuffer, GroupOf, build_buffers
from megatron.core.mesh import Mesh


class DataParallel:
    """The gradients of this rank's model chunks, and their sum over replicas."""

    def __init__(
        self,
        modules: Iterable[nn.Module],
        mesh: Mesh,
        grad_dtype: torch.dtype,
        *,
        group_of: GroupOf,
        bucket_size: int | None = None,
    ) -> None:
        self.mesh = mesh
        self.buffers: list[FlatBuffer] = []
        for parameters in trainable(modules):
            tied = [sharding.of(p).name for p in parameters if sharding.of(p).tied]
            assert not tied or mesh.pp.size == 1, f"sums over stages of {tied} are not built yet"
            self.buffers += build_buffers(
                parameters,
                grad_dtype,
                group_of=group_of,
                data_size=mesh.dp_cp.size,
                bucket_size=bucket_size,
            )

    def zero_grad(self) -> None:
        """Set all gradients to zero."""
        for buffer in self.buffers:
            buffer.zero_grad()

    def reduce_gradients(self) -> None:
        """Sum all gradients over the replicas and over the axes their regions name."""
        pending = []
        for buffer in self.buffers:
            buffer.check_gradients()
            axis = self.mesh[buffer.data_axis]
            for start, stop in buffer.plan.buckets:
                pending.append(comm.all_reduce(buffer.grad[start:stop], axis, async_op=True))
        for handle in pending:
            handle.wait()
        finalize.sum_regions(self.buffers, self.mesh)


def trainable(modules: Iterable[nn.Module]) -> list[list[nn.Parameter]]:
    """Return each chunk's parameters that take gradients; a shared one belongs to the first."""
    seen: set[int] = set()
    chunks = []
    for module in modules:
        mine = [p for p in module.parameters() if p.requires_grad and id(p) not in seen]
        seen.update(map(id, mine))
        chunks.append(mine)
    return chunks
