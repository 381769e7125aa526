"""The memory of every pipeline rank, before a run: what is fixed, and what microbatches keep.

Ranks that differ only by tensor, context or data coordinate hold equally much. Bytes of weights,
gradients, masters and optimizer states are those of the buffers that a run will make; activations
are what a schedule has alive at its fullest moment, see `activations` and `pipeline_plan`.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron.core.optimizer import memory
from megatron.training.config import RunConfig
from megatron.training.plan import accounting, activations
from megatron.training.plan import pipeline as pipeline_plan
from megatron.training.plan.ledger import Footprint
from megatron.training.plan.saved import Share


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank of the pipeline."""

    parameters: int
    fixed: dict[str, int]
    """Weights, gradients, masters and optimizer states: exact."""
    activations: int
    """Of all microbatches that are alive at once: an estimate."""
    host: int = 0
    """In host memory: activations of the same microbatches that are offloaded."""

    @property
    def total(self) -> int:
        """Return the sum of all that is on the device."""
        return sum(n for name, n in self.fixed.items() if name != "host") + self.activations


class MemoryPlan:
    """What each rank of the pipeline holds, and how much more it could."""

    def __init__(self, config: RunConfig, padded_rows: int) -> None:
        self.config, self.padded_rows = config, padded_rows
        self.fixed = [*_fixed(config, padded_rows)]
        """(Parameters, bytes by category) of each rank."""

    def ranks(self) -> list[RankMemory]:
        """Return the memory of each rank at the run's micro-batch."""
        count = pipeline_plan.microbatches(self.config)
        held = self._alive(self.config.training.micro_batch_size, count)
        return [RankMemory(*fixed, *most) for fixed, most in zip(self.fixed, held, strict=True)]

    def largest_micro_batch(self, memory_bytes: float) -> int:
        """Return the largest micro-batch that fits ranks of ``memory_bytes``, 0 if none does.

        An iteration has as many microbatches as now: the global batch grows with them.
        """
        count = pipeline_plan.microbatches(self.config)
        low, high = 0, 1
        while self._fits(high, count, memory_bytes):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            fits = self._fits(middle, count, memory_bytes)
            low, high = (middle, high) if fits else (low, middle)
        return low

    def largest_divisor(self, memory_bytes: float) -> int:
        """Return the largest micro-batch that fits and makes up the same global batch, 0 if none.

        Larger ones are fewer, of which fewer may be alive.
        """
        share = self.config.batch_sizes.final // self.config.data_parallel_size
        sizes = divisors(share)
        # A single one is alive in all of a rank's chunks at once: no schedule has less.
        fitting = bisect_left(sizes, True, key=lambda size: not self._fits(size, 1, memory_bytes))
        for size in reversed(sizes[:fitting]):
            if self._fits(size, share // size, memory_bytes):
                return size
        return 0

    def _fits(self, samples: int, count: int, memory_bytes: float) -> bool:
        held = self._alive(samples, count)
        fixed = [sum(n for name, n in parts.items() if name != "host") for _, parts in self.fixed]
        return all(a + b <= memory_bytes for a, (b, _) in zip(fixed, held, strict=True))

    def _alive(self, samples: int, count: int) -> list[tuple[int, int]]:
        """Return what ``count`` microbatches of ``samples`` keep at each rank's fullest moment.

        First on the device, then in host memory.
        """
        config, placement = self.config, self.config.placement
        prints = [
            activations.footprint(config, self.padded_rows, stage, samples)
            for stage in config.stages
        ]
        if placement.shape == "v":
            # At the turn a stage's input is the other's output, which nobody frees after sending.
            turn, shared = placement.num_ranks, Share(config, samples).residual
            for position, moved in ((turn - 1, shared), (turn, -shared)):
                kept = prints[position].kept + moved
                prints[position] = replace(prints[position], kept=kept)
        found = []
        for rank, moments in enumerate(pipeline_plan.alive(config.pipeline, placement, count)):
            mine = [prints[position] for position in placement.positions(rank)]
            if config.training.skip_train:
                found.append((max(chunk.working for chunk in mine), 0))
            else:
                most = max(_held(moment, mine) for moment in moments)
                found.append((most, max(_host(moment, mine) for moment in moments)))
        return found


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, the smallest first.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    low = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return low + [number // size for size in reversed(low) if size * size != number]


def _held(moment: pipeline_plan.Alive, chunks: Sequence[Footprint]) -> int:
    """Return the bytes of a rank's fullest moment while a backward goes on, or just before it."""
    held = zip(moment.kept, moment.postponed, chunks, strict=True)
    alive = sum(kept * chunk.kept + late * chunk.postponed for kept, late, chunk in held)
    working = max(chunk.working for chunk in chunks)
    return alive + max(working, chunks[moment.chunk].backward)


def _host(moment: pipeline_plan.Alive, chunks: Sequence[Footprint]) -> int:
    return sum(kept * chunk.host for kept, chunk in zip(moment.kept, chunks, strict=True))


def _fixed(config: RunConfig, padded_rows: int) -> Iterator[tuple[int, dict[str, int]]]:
    """Yield (parameters, bytes by category) of each rank of the pipeline."""
    for rank in range(config.parallel.pipeline_model_parallel_size):
        chunks = accounting.chunk_buffers(config, padded_rows, rank)
        plans = [plan for chunk in chunks for plan in chunk]
        parameters = sum(slot.stop - slot.start for plan in plans for slot in plan.slots)
        if config.training.skip_train:  # no optimizer, hence no buffers
            size = memory.BYTES[config.precision.params_dtype]
            yield parameters, {"weights": parameters * size}
        else:
            fixed = memory.predict(
                plans,
                config.optimizer,
                config.precision,
                config.replicas.data_parallel_sharding_strategy,
                config.shares,
                by_torch=config.shared_by_torch,
            )
            yield parameters, fixed
