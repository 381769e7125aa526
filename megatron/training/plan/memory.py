"""The memory of every pipeline rank, before a run: what is fixed, and what comes and goes.

Ranks that differ only by tensor, context or data coordinate hold equally much. Bytes of weights,
gradients, masters and optimizer states are those of the buffers that a run will make; activations
are what a schedule has alive at its fullest moment, see `activations` and `pipeline_plan`;
communication is what is gathered or summed there (`passing`, `gathered`, `sums`). The fullest
moments of these two need not be the same, so the most of both together is a number of its own.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from megatron.core.distributed.layout import BufferPlan
from megatron.core.optimizer import memory
from megatron.core.utils import divisors
from megatron.training.config import RunConfig
from megatron.training.plan import activations, buffer_plans, passing, peaks, stacks, sums
from megatron.training.plan import pipeline as pipeline_plan
from megatron.training.plan.building import building
from megatron.training.plan.gathered import gathered
from megatron.training.plan.passing import Passing
from megatron.training.plan.peaks import Chunk, Later, Peak
from megatron.training.plan.share import Share
from megatron.training.plan.staged import staged


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank of the pipeline."""

    parameters: int
    fixed: dict[str, int]
    """Weights, gradients, masters and optimizer states: exact."""
    activations: int
    """Of all microbatches that are alive at once, at most."""
    host: int = 0
    """In host memory: activations of the same microbatches that are offloaded."""
    communication: int = 0
    """Of what is there to be sent, or is gathered from other ranks, at most."""
    together: int = 0
    """Of activations and communication at one time, at most."""
    building: int = 0
    """Of all that is there while the model is built, at most."""
    staged: int = 0
    """In host memory: copies of what is saved beside training, at most."""

    def categories(self) -> dict[str, int]:
        """Return the bytes of every category by its name; of what is in host memory, together."""
        host = self.fixed.get("host", 0) + self.host
        on_device = {name: size for name, size in self.fixed.items() if name != "host"}
        moving = {"activations": self.activations, "communication": self.communication}
        staged = {"staged": self.staged} if self.staged else {}
        return {**on_device, **moving, "host": host, **staged}

    @property
    def at_work(self) -> int:
        """Return the bytes on the device at the fullest moment of an iteration."""
        return _on_device(self.fixed) + self.together

    @property
    def total(self) -> int:
        """Return the bytes on the device at the fullest moment."""
        return max(self.building, self.at_work)


def _sent(config: RunConfig, samples: int) -> int:
    """Return the bytes that a stage is sent of a microbatch of ``samples``: all its texts."""
    return Share(config, samples, sum(stacks.lengths(config))).residual


def _on_device(fixed: dict[str, int]) -> int:
    return sum(size for name, size in fixed.items() if name != "host")


class MemoryPlan:
    """What each rank of the pipeline holds, and how much more it could."""

    def __init__(self, config: RunConfig, padded_rows: int) -> None:
        self.config, self.padded_rows = config, padded_rows
        self._ranks = [
            _Rank(config, padded_rows, rank) for rank in range(config.placement.num_ranks)
        ]

    def ranks(self) -> list[RankMemory]:
        """Return the memory of each rank at the run's micro-batch."""
        count = pipeline_plan.microbatches(self.config)
        peaks = self._peaks(self.config.training.micro_batch_size, count)
        return [
            RankMemory(
                rank.parameters,
                rank.fixed,
                *peak,
                building=rank.building,
                staged=rank.staged,
            )
            for rank, peak in zip(self._ranks, peaks, strict=True)
        ]

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
        peaks = self._peaks(samples, count)
        return all(
            max(_on_device(rank.fixed) + peak.together, rank.building) <= memory_bytes
            for rank, peak in zip(self._ranks, peaks, strict=True)
        )

    def _peaks(self, samples: int, count: int) -> list[Peak]:
        """Return what ``count`` microbatches of ``samples`` have at each rank's fullest moments."""
        config, placement = self.config, self.config.placement
        chunks: dict[int, Chunk] = {}
        for number, rank in enumerate(self._ranks):
            for position, passes in zip(placement.positions(number), rank.passing, strict=True):
                stage = config.stages[position]
                there = passes.plus(gathered(config, stage, samples))
                kept = activations.footprint(config, self.padded_rows, stage, samples, there)
                chunks[position] = Chunk(kept, there)
        if placement.shape == "v":
            # At the turn a stage's input is the other's output, which nobody frees after sending.
            turn, shared = placement.num_ranks, _sent(config, samples)
            for position, moved in ((turn - 1, shared), (turn, -shared)):
                kept, there = chunks[position]
                chunks[position] = Chunk(replace(kept, kept=kept.kept + moved), there)
        mine = [
            [chunks[at] for at in placement.positions(rank)] for rank in range(len(self._ranks))
        ]
        if config.training.skip_train:
            return [peaks.evaluation(of) for of in mine]
        moments = pipeline_plan.alive(config.pipeline, placement, count)
        return [
            peaks.training(when, of, rank.later)
            for when, of, rank in zip(moments, mine, self._ranks, strict=True)
        ]


class _Rank:
    """What of a pipeline rank no micro-batch changes."""

    def __init__(self, config: RunConfig, padded_rows: int, number: int) -> None:
        buffers = buffer_plans.chunk_buffers(config, padded_rows, number)
        plans = [plan for chunk in buffers for plan in chunk]
        self.parameters = sum(slot.stop - slot.start for plan in plans for slot in plan.slots)
        self.building = self.staged = 0
        if config.training.skip_train:  # no optimizer, hence no buffers
            size = memory.BYTES[config.precision.params_dtype]
            self.fixed = {"weights": self.parameters * size}
            self.passing = [Passing()] * len(buffers)
            return
        self.fixed = _fixed(config, plans)
        units = plans
        if config.shared_by_torch:  # its units are the same; what it has of them is near to ours
            ours = replace(config, replicas=replace(config.replicas, use_torch_fsdp2=False))
            chunks = buffer_plans.chunk_buffers(ours, padded_rows, number)
            units = [plan for chunk in chunks for plan in chunk]
        self.building = building(config, units)
        self.staged = staged(config, plans)
        stages = [config.stages[at] for at in config.placement.positions(number)]
        self.passing = [passing.of_stage(config, stage, units) for stage in stages]
        replicas = max(config.axis_sizes["dp_cp"], config.axis_sizes["edp"])
        self.later = Later(
            sums.copies(config, buffers),
            sums.largest_moment(config, padded_rows, number, plans),
            overlaps=config.replicas.overlap_grad_reduce and replicas > 1,
        )


def _fixed(config: RunConfig, plans: Sequence[BufferPlan]) -> dict[str, int]:
    """Return the bytes of a rank's buffers by category, those of experts among them."""
    total: Counter[str] = Counter()
    for shares, mine in groupby(plans, lambda plan: buffer_plans.shares_of(config, plan)):
        total += Counter(
            memory.predict(
                list(mine),
                config.optimizer,
                config.precision,
                config.replicas.data_parallel_sharding_strategy,
                shares,
                by_torch=config.shared_by_torch,
            )
        )
    return {name: total[name] for name in ("weights", "gradients", "masters", "states", "host")}
