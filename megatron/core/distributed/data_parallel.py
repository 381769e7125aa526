"""Data parallelism: every replica ends with the sum of all replicas' gradients of what it updates.

The gradients of each model chunk lie in flat buffers, cut into buckets; a bucket is summed over the
replicas by one collective (`reduction`). Buckets are launched in one static order, equal on all
ranks: chunk by chunk as their last backwards come, within a chunk by place. With ``overlap`` a
bucket is launched as soon as it and those before it are complete, while the backward goes on:

    begin(chunk ...)      before each action that adds to a chunk's gradients
    finish(chunk ...)     after it; after the last one the chunk's other buckets are launched
    reduce_gradients()    what is left is launched, all is waited for, regions are summed
    publish_weights()     weights that other ranks updated are gathered

    no_shard, optim       one sum of each bucket per iteration, then sums of regions (`finalize`)
    optim_grads(_params)  one sum of each unit per microbatch (`fully_sharded`), then of regions;
                          of experts alone in their instance one per iteration, at its end

When a gradient is complete in a backward, autograd's hook tells: it comes once, after everything
that uses the parameter, also where layers add the gradient themselves. Without a gradient it does
not come, and the bucket waits for `finish`; so it does where a schedule splits the backward, since
the last of it is no backward of autograd's.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from megatron.core.distributed import finalize, pieces, reduction
from megatron.core.distributed.buffers import FlatBuffer, build_buffers
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.distributed.fully_sharded import FullySharded
from megatron.core.distributed.gathering import WeightGather
from megatron.core.distributed.pieces import Fill, GroupOf, Member
from megatron.core.distributed.ranges import Range
from megatron.core.distributed.reduction import Finish
from megatron.core.distributed.replicas import shares_of, shares_of_experts
from megatron.core.distributed.units import find_units
from megatron.core.mesh import Mesh


class DataParallel:
    """The weights and gradients of this rank's model chunks, and what replicas do with them.

    Args:
        chunks: this rank's parts of the model; their parameters have records and values.
        mesh: axes and device.
        grad_dtype: of gradients.
        group_of: gives the optimizer group of a parameter.
        config: how gradients are summed and what is shared out.
        reduce_dtype: in which gradients travel; that of gradients when absent.
        fill: gives values to parameters without memory.
    """

    def __init__(
        self,
        chunks: Iterable[nn.Module],
        mesh: Mesh,
        grad_dtype: torch.dtype,
        *,
        group_of: GroupOf,
        config: DataParallelConfig | None = None,
        reduce_dtype: torch.dtype | None = None,
        fill: Fill | None = None,
    ) -> None:
        config = config or DataParallelConfig.resolve()
        self.mesh, self.shares = mesh, shares_of(config, mesh)
        self.expert_shares = shares_of_experts(config, mesh)
        self.buffers: list[FlatBuffer] = []
        modules = list(chunks)
        everything = {id(p): p for module in modules for p in module.parameters()}
        self._frozen = [p for p in everything.values() if not p.requires_grad]
        for parameter in self._frozen:
            pieces.provide(parameter, fill)
        shared = in_several(modules)
        by_chunk: list[list[FlatBuffer]] = []
        for parameters in trainable(modules):
            numel = sum(parameter.numel() for parameter in parameters)
            by_chunk.append(
                build_buffers(
                    parameters,
                    grad_dtype,
                    group_of=group_of,
                    shares=self.shares,
                    expert_shares=self.expert_shares,
                    bucket_size=config.bucket_size(numel, mesh.dp_cp.size),
                    apart=shared,
                    fill=fill,
                )
            )
            self.buffers += by_chunk[-1]
        reduce_dtype = reduce_dtype or grad_dtype
        self.divisor = reduction.divisor(self.shares, reduce_dtype)
        overlaps = config.overlap_grad_reduce and max(mesh.dp_cp.size, mesh.edp.size) > 1
        self._queues: list[_Queue] = []
        self._sharded: FullySharded | None = None
        self._gather: WeightGather | None = None
        if self.shares.gradients:
            self._sharded = FullySharded(
                modules,
                [completion_order(module, self.buffers) for module in modules],
                find_units(modules),
                reduce_dtype,
                overlap=overlaps,
            )
            # Experts whose replicas share nothing have all gradients, which are summed at the end.
            by_chunk = [[b for b in mine if not b.shares.gradients] for mine in by_chunk]
            overlaps = False
        self._queues = [_Queue(mine, shared, reduce_dtype, overlaps) for mine in by_chunk]
        if self.shares.axis.size > 1 and not self.shares.weights:
            overlap = config.overlap_param_gather
            self._gather = WeightGather(self.buffers, find_units(modules), overlap=overlap)

    def zero_grad(self) -> None:
        """Set all gradients to zero."""
        for buffer in self.buffers:
            buffer.zero_grad()

    def begin(self, chunk: int, kind: str, last: bool) -> None:
        """Expect gradients of a chunk's parameters.

        Args:
            chunk: its number.
            kind: ``backward``, or one of its parts ``backward_input``, ``backward_weight``.
            last: no more gradients of this chunk come in this iteration.
        """
        if self._sharded is not None:
            self._sharded.begin(chunk, kind)
        elif last:
            self._queues[chunk].begin()

    def finish(self, chunk: int, kind: str, last: bool) -> None:
        """Take note that the gradients that `begin` announced are there."""
        if self._sharded is not None:
            self._sharded.finish(chunk, kind)
        elif last:
            self._queues[chunk].finish()

    def reduce_gradients(self) -> None:
        """Sum all gradients over the replicas and over the axes their regions name."""
        for buffer in self.buffers:
            buffer.check_gradients()
        for queue in self._queues:
            queue.flush()
        reduction.even_out(self.buffers, self.divisor)
        reduction.sum_copies(self.buffers)
        finalize.sum_regions(self.buffers, self.mesh)

    def publish_weights(self) -> None:
        """Let every rank have the weights that others updated; a collective of the replicas.

        With ``overlap_param_gather`` they may be on their way still: `settle` waits.
        """
        if self._gather is not None:
            self._gather.start()

    def settle(self) -> None:
        """Return once all weights that this rank keeps are there."""
        if self._gather is not None:
            self._gather.settle()

    def whole_parameters(self) -> Iterator[nn.Parameter]:
        """Yield `parameters`, each with all of its weights there until the next is asked for.

        A collective of those who share weights.
        """
        self.settle()
        for buffer in self.buffers:
            if self._sharded is not None:
                self._sharded.weights.hold([buffer])
            yield from buffer.parameters
            if self._sharded is not None:
                self._sharded.weights.release([buffer])
        yield from self._frozen

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return all parameters of the chunks, each once: in the order of buffers, then others."""
        return [*(p for buffer in self.buffers for p in buffer.parameters), *self._frozen]

    def gradients(self) -> Iterator[tuple[Member, Tensor]]:
        """Yield what this rank has of each parameter's reduced gradient, as flat views."""
        return pieces.gradients(self.buffers)

    def weights(self) -> Iterator[tuple[Member, Tensor]]:
        """Yield what this rank updates of each parameter, as flat views."""
        return pieces.weights(self.buffers)


def completion_order(chunk: nn.Module, buffers: Iterable[FlatBuffer]) -> list[FlatBuffer]:
    """Return the buffers that a chunk uses in the order in which a backward completes them.

    That is backwards in the model, by the first unit that uses a buffer.
    """
    home = {id(p): buffer for buffer in buffers for p in buffer.parameters}
    parameters = [p for unit in find_units([chunk]) for p in unit.parameters]
    first_use = list({id(b): b for b in (home[id(p)] for p in parameters)}.values())
    return first_use[::-1]


class _Queue:
    """The buckets of one chunk, in the order in which all ranks launch them."""

    def __init__(
        self,
        buffers: list[FlatBuffer],
        shared: frozenset[int],
        reduce_dtype: torch.dtype,
        overlaps: bool,
    ) -> None:
        self._reduce_dtype, self._overlaps = reduce_dtype, overlaps
        # What another chunk adds to as well is complete only at the end: such buffers come last.
        late = [buffer for buffer in buffers if id(buffer.parameters[0]) in shared]
        early = [buffer for buffer in buffers if id(buffer.parameters[0]) not in shared]
        self._buckets = [(b, n) for b in (*early, *late) for n in range(len(b.plan.buckets))]
        self._early = sum(len(buffer.plan.buckets) for buffer in early)
        self._launched = 0
        self._pending: list[Finish] = []
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
        self._waiting = [
            _inside(buffer, buffer.plan.buckets[number])
            for buffer, number in self._buckets[: self._early]
        ]

    def finish(self) -> None:
        if not self._overlaps:
            return
        self._listens = False
        self._launch(self._early)

    def flush(self) -> None:
        self._launch(len(self._buckets))
        for finish in self._pending:
            finish()
        self._pending.clear()
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
        for buffer, number in self._buckets[self._launched : stop]:
            self._pending.append(reduction.start(buffer, number, self._reduce_dtype))
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
