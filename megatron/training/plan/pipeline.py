"""What a schedule costs, known before a run: microbatches alive at once, and time spent waiting.

A rank does its actions one after the other, so what is alive on it follows from its list alone. How
long it waits needs the simulator, which is too slow for an iteration of many microbatches; but a
steady state adds work and no waiting, so that a short iteration tells the waiting of a long one.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from megatron.core.pipeline_parallel.actions import Pair, Step
from megatron.core.pipeline_parallel.config import PipelineConfig
from megatron.core.pipeline_parallel.placement import Placement
from megatron.core.pipeline_parallel.simulator import Costs, simulate
from megatron.training.config import RunConfig

COSTS = Costs()
"""A forward and each half of a backward take equally long, and messages no time."""


class Alive(NamedTuple):
    """How many microbatches a rank holds when a backward begins, or the second part of one."""

    kept: tuple[int, ...]
    """By chunk: forward has begun, and backward is not done."""
    postponed: tuple[int, ...]
    """By chunk: of the backward, only the weights' gradients are left."""
    chunk: int
    """Whose backward begins."""
    begun: tuple[bool, ...]
    """By chunk: its last backward had its first part, and no second one since."""
    is_second: bool = False
    """What begins is the second part."""
    beside: int | None = None
    """The chunk of the forward beside it, which counts as begun, where both are a pair."""

    @property
    def microbatches(self) -> float:
        """Return all of them, where one in a single chunk of v counts 1/v."""
        return (sum(self.kept) + sum(self.postponed)) / len(self.kept)


def microbatches(config: RunConfig) -> int:
    """Return the microbatches of the largest iteration on one replica."""
    return max(1, max(config.batch_sizes.sizes) // config.samples_per_pass)


@lru_cache(maxsize=64)
def alive(pipeline: PipelineConfig, placement: Placement, count: int) -> Sequence[set[Alive]]:
    """Return, by rank, the moments of an iteration of ``count`` microbatches that may be fullest.

    Which of them is depends on what each chunk keeps, and on what its backward needs besides.
    """
    if pipeline.schedule_name(placement) == "gpipe":  # every forward comes before any backward
        return ({Alive((count,), (0,), 0, (False,))},) * placement.num_ranks
    schedule = pipeline.schedule(placement, _enough(pipeline, placement, count))
    return tuple(_peaks(steps, placement.num_chunks) for steps in schedule.steps)


def _peaks(steps: Sequence[Step], num_chunks: int) -> set[Alive]:
    """Return what is alive before each backward: until there, forwards have only added to it."""
    kept, postponed, begun = [0] * num_chunks, [0] * num_chunks, [False] * num_chunks
    found = set()
    for step in steps:
        action, beside = step.backward if isinstance(step, Pair) else step, None
        if isinstance(step, Pair):
            beside = step.forward.chunk
            kept[beside] += 1
        if action.kind == "forward":
            kept[action.chunk] += 1
            continue
        second = action.kind == "backward_weight"
        now = (tuple(kept), tuple(postponed), action.chunk, tuple(begun))
        found.add(Alive(*now, second, beside))
        if second:
            postponed[action.chunk] -= 1
            begun[action.chunk] = False
        else:
            kept[action.chunk] -= 1
            begun[action.chunk] = action.kind == "backward_input"
            postponed[action.chunk] += begun[action.chunk]
    return found


@lru_cache(maxsize=64)
def bubble(pipeline: PipelineConfig, placement: Placement, count: int) -> float:
    """Return `Timeline.bubble` of an iteration of ``count`` microbatches under `COSTS`."""
    if placement.num_ranks == 1:
        return 0.0
    short = _enough(pipeline, placement, count)
    timeline = simulate(pipeline.schedule(placement, short), COSTS)
    work = COSTS.forward + COSTS.backward_input + COSTS.backward_weight
    return (timeline.makespan - short * work) / (count * work)


def _enough(pipeline: PipelineConfig, placement: Placement, count: int) -> int:
    """Return as many microbatches as there need be to see all that ``count`` have to show.

    A steady state repeats itself with every group of an interleaved schedule, and with every
    microbatch of another. GPipe has none, but waits equally long for any number of them: until the
    last rank turns from forwards to backwards.
    """
    group = pipeline.microbatch_group_size_per_vp_stage or placement.num_ranks
    period = group if placement.num_chunks > 1 and placement.shape == "loop" else 1
    # Pairs begin after twice as many forwards.
    ahead = placement.num_ranks * (1 + pipeline.overlap_moe_expert_parallel_comm)
    enough = 2 * (ahead + period)
    return count if count <= enough else enough + (count - enough) % period


CLOSED_FORMS: Mapping[str, tuple[str, float]] = {
    "gpipe": ("(p-1)/m", 1.0),
    "1f1b": ("(p-1)/m", 1.0),
    "interleaved": ("(p-1)/(v m)", 1.0),
    "zb-h1": ("(p-1)/(3m)", 1 / 3),
    "zb-v": ("(p-1)/(6m)", 1 / 6),
}
"""Bubble of a schedule under `COSTS`, for m microbatches (a whole number of groups, and enough of
them) on p ranks of v chunks: how it is written, and its factor."""


def closed_form(pipeline: PipelineConfig, placement: Placement, count: int) -> tuple[str, float]:
    """Return the formula of the bubble of ``count`` microbatches, and its value."""
    name = pipeline.schedule_name(placement)
    text, factor = CLOSED_FORMS[name]
    chunks = placement.num_chunks if name == "interleaved" else 1
    return text, factor * (placement.num_ranks - 1) / (chunks * count)
