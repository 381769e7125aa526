"""Data parallelism: every replica ends with the same sum of all replicas' gradients.

The gradients of each model chunk lie in flat buffers, cut into buckets; a bucket is summed over the
replicas by one collective. Buckets are launched in one static order, equal on all ranks: chunk by
chunk as their last backwards come, within a chunk by place. With ``overlap`` a bucket is launched
as soon as it and those before it are complete, while the backward goes on:

    begin(chunk)          before the last backward of a chunk
    finish(chunk)         after it: the chunk's other buckets are launched
    reduce_gradients()    what is left is launched, all is waited for, regions are summed

    once per iteration    all-reduce of each bucket over dp x cp, then sums of regions (`finalize`)

When a gradient is complete in a backward, autograd's hook tells: it comes once, after everything
that uses the parameter, also where layers add the gradient themselves. Without a gradient it does
not come, and the bucket waits for `finish`; so it does where a schedule splits the backward, since
the last of it is no backward of autograd's.
"""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn

from megatron.core import comm
from megatron.core.distributed import finalize
from megatron.core.distributed.buffers import FlatBuffer, GroupOf, build_buffers
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.distributed.layout import Range
from megatron.core.mesh import Mesh


class DataParallel:
    """The gradients of this rank's model chunks, and their sum over replicas."""

    def __init__(
        self,
        chunks: Iterable[nn.Module],
        mesh: Mesh,
        grad_dtype: torch.dtype,
        *,
        group_of: GroupOf,
        config: DataParallelConfig | None = None,
    ) -> None:
        config = config or DataParallelConfig.resolve()
        self.mesh = mesh
        self.buffers: list[FlatBuffer] = []
        self._queues: list[_Queue] = []
        overlaps = config.overlap_grad_reduce and mesh.dp_cp.size > 1
        modules = list(chunks)
        shared = in_several(modules)
        for parameters in trainable(modules):
            numel = sum(parameter.numel() for parameter in parameters)
            buffers = build_buffers(
                parameters,
                grad_dtype,
                group_of=group_of,
                data_size=mesh.dp_cp.size,
                bucket_size=config.bucket_size(numel, mesh.dp_cp.size),
                apart=shared,
            )
            self.buffers += buffers
            self._queues.append(_Queue(buffers, mesh, shared, overlaps))

    def zero_grad(self) -> None:
        """Set all gradients to zero."""
        for buffer in self.buffers:
            buffer.zero_grad()

    def begin(self, chunk: int) -> None:
        """Expect the last gradients of a chunk's parameters."""
        self._queues[chunk].begin()

    def finish(self, chunk: int) -> None:
        """Take note that the gradients of a chunk's parameters are complete."""
        self._queues[chunk].finish()

    def reduce_gradients(self) -> None:
        """Sum all gradients over the replicas and over the axes their regions name."""
        for buffer in self.buffers:
            buffer.check_gradients()
        for queue in self._queues:
            queue.flush()
        finalize.sum_regions(self.buffers, self.mesh)


class _Queue:
    """The buckets of one chunk, in the order in which all ranks launch them."""

    def __init__(
        self, buffers: list[FlatBuffer], mesh: Mesh, shared: frozenset[int], overlaps: bool
    ) -> None:
        self._mesh, self._overlaps = mesh, overlaps
        # What another chunk adds to as well is complete only at the end: such buffers come last.
        late = [buffer for buffer in buffers if id(buffer.parameters[0]) in shared]
        early = [buffer for buffer in buffers if id(buffer.parameters[0]) not in shared]
        self._buckets = [(b, span) for b in (*early, *late) for span in b.plan.buckets]
        self._early = sum(len(buffer.plan.buckets) for buffer in early)
        self._launched = 0
        self._handles: list[comm.Handle] = []
        self._listens = False
        self._waiting: list[set[int]] = []
        """Parameters that each bucket still waits for, by id."""
        if overlaps:
            for parameter in (p for buffer in early for p in buffer.parameters):
                parameter.register_post_accumulate_grad_hook(self._complete)

    def begin(self) -> None:
        if not self._overlaps:
            return
        self._listens = True
        self._waiting = [_inside(*bucket) for bucket in self._buckets[: self._early]]

    def finish(self) -> None:
        if not self._overlaps:
            return
        self._listens = False
        self._launch(self._early)

    def flush(self) -> None:
        self._launch(len(self._buckets))
        for handle in self._handles:
            handle.wait()
        self._handles.clear()
        self._launched = 0

    def _complete(self, parameter: torch.Tensor) -> None:
        if not self._listens:
            return
        for waiting in self._waiting:
            waiting.discard(id(parameter))
        ready = self._launched
        while ready < self._early and not self._waiting[ready]:
            ready += 1
        self._launch(ready)

    def _launch(self, stop: int) -> None:
        """Start the sums of the buckets before number ``stop``."""
        for buffer, (start, end) in self._buckets[self._launched : stop]:
            axis = self._mesh[buffer.data_axis]
            self._handles.append(comm.all_reduce(buffer.grad[start:end], axis, async_op=True))
        self._launched = max(self._launched, stop)


def _inside(buffer: FlatBuffer, bucket: Range) -> set[int]:
    """Return the ids of the parameters with elements in a bucket."""
    return {
        id(parameter)
        for slot, parameter in zip(buffer.plan.slots, buffer.parameters, strict=True)
        if slot.start < bucket[1] and bucket[0] < slot.stop
    }


def trainable(modules: Iterable[nn.Module]) -> list[list[nn.Parameter]]:
    """Return each chunk's parameters that take gradients; a shared one belongs to the first."""
    seen: set[int] = set()
    chunks = []
    for module in modules:
        mine = [p for p in module.parameters() if p.requires_grad and id(p) not in seen]
        seen.update(map(id, mine))
        chunks.append(mine)
    return chunks


def in_several(modules: Iterable[nn.Module]) -> frozenset[int]:
    """Return the ids of parameters that more than one chunk uses."""
    counts = Counter(id(p) for module in modules for p in module.parameters())
    return frozenset(found for found, count in counts.items() if count > 1)
