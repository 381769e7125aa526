"""Pipeline schedules as data: the list of actions that each rank goes through in one iteration.

A generator is a pure function of a rank's place and the number of microbatches. What it returns is
all that tells one schedule from another: the executor runs any list, the simulator times it,
`order` finds its transfers.

    gpipe         all forwards, then all backwards         Huang et al., 2018, arXiv:1811.06965
    1f1b          one forward, one backward                Narayanan et al., 2020, arXiv:2006.09503
    interleaved   1f1b over several chunks per rank        Narayanan et al., 2021, arXiv:2104.04473
    zb-h1         1f1b, weight gradients fill the bubble   Qi et al., 2023, arXiv:2401.10241
    zb-v          as zb-h1, two chunks per rank in a V     Qi et al., 2024, arXiv:2405.15362

A zero-bubble schedule splits a backward: ``backward_input`` makes the gradient that the stage
before waits for, ``backward_weight`` the weights' gradients, for which nobody waits.

1f1b and interleaved may be *combined*: a forward and the backward that comes after it are one step
(`Pair`), in which each computes while the other's tokens travel (the combined 1F1B of DeepSeek-V3,
2412.19437, section 3.2.1, and Megatron-LM). Both must be ready when it begins, so that forwards run
ahead by more.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

from megatron.core.pipeline_parallel.actions import Action, Kind, Pair, Step, parts
from megatron.core.pipeline_parallel.placement import Placement
from megatron.core.utils import UserError

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]
SCHEDULES: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
COMBINED = ("1f1b", "interleaved")
"""Schedules whose forwards and backwards take turns."""


def gpipe(stage: int, num_stages: int, num_microbatches: int) -> list[Step]:
    """Return all forwards, then all backwards: every microbatch is alive at once."""
    return _alternate(num_microbatches, num_microbatches)


def one_forward_one_backward(
    stage: int, num_stages: int, num_microbatches: int, *, combined: bool = False
) -> list[Step]:
    """Return the 1F1B order: warm up, alternate, drain.

    A stage may run ahead of its first backward by the number of stages after it, so at most
    ``num_stages - stage`` microbatches are alive at once.

    Combined, twice as many are. The last stage has one more forward before its first backward, or
    both would be of one microbatch. What a pair makes is there at its end, so that a gradient and
    the forward that answers it are two pairs' time apart at each hop: a stage that ran ahead of the
    next one by one forward alone would stand still in every other pair's time.
    """
    after = num_stages - stage - 1
    return _alternate(num_microbatches, 2 * after + 1 if combined else after, combined=combined)


def interleaved(
    rank: int,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int,
    group_size: int,
    *,
    combined: bool = False,
) -> list[Step]:
    """Return Megatron's interleaved 1F1B order over the chunks of a rank.

    ``group_size`` microbatches pass through a chunk before its rank turns to the next chunk. A rank
    runs ahead by its group through all chunks but the last, and by two more actions for each rank
    after it, so that its alternation meets its neighbour's.

    The last group may be smaller. Where it has fewer microbatches than there are ranks, strict
    alternation would wait for itself (Megatron-LM refuses such counts): the order is then that of a
    full round of ranks, without the microbatches that are not there.

    Combined, every rank runs ahead by one more: it does so by two for each rank after it already.
    """
    warmup = 2 * (num_ranks - rank - 1) + (num_chunks - 1) * group_size + combined
    missing = num_ranks - num_microbatches % group_size
    total = num_microbatches + (missing if 0 < missing < num_ranks else 0)
    steps = _alternate(total, warmup, num_chunks, group_size, combined=combined)
    return [left for step in steps for left in _left(step, num_microbatches)]


def _left(step: Step, num_microbatches: int) -> tuple[Step, ...]:
    """Return what is left of a step if there are but ``num_microbatches``."""
    there = tuple(part for part in parts(step) if part.microbatch < num_microbatches)
    return (step,) if there == parts(step) else there


def zero_bubble_h1(stage: int, num_stages: int, num_microbatches: int) -> list[Step]:
    """Return ZB-H1: 1F1B whose weight gradients lag behind by ``stage`` microbatches.

    Later stages would hold fewer microbatches than the first: they spend the difference on
    postponing weight gradients, so that all hold at most ``num_stages``, and the postponed work
    fills the drain.
    """
    ahead, lag = num_stages - stage - 1, stage
    steady = max(num_microbatches, num_stages) - ahead - lag
    return _unroll(
        num_microbatches, (ahead, "F"), (lag, "F I"), (steady, "F I W"), (ahead, "I W"), (lag, "W")
    )


def zero_bubble_v(rank: int, num_ranks: int, num_microbatches: int) -> list[Step]:
    """Return ZB-V: chunk 0 leads down the ranks, chunk 1 back up, so rank 0 holds both ends.

    With equal costs of forward, input gradient and weight gradient no rank waits between its first
    action and its last, and all hold as much as the first stage of 1F1B does.
    """
    after = num_ranks - rank
    steady = max(num_microbatches, 2 * num_ranks - 1) - 2 * num_ranks + rank + 1
    return _unroll(
        num_microbatches,
        (2 * after - 1, "F0"),
        (rank, "F1 F0"),
        (after, "F1 I1 W1"),
        (steady, "F0 I0 W0 F1 I1 W1"),
        (after - 1, "I0 W0 F1 I1 W1"),
        (rank, "I0 I1"),
        (after, "I0 W0"),
        (rank, "W1 W0"),
    )


def forward_only(
    rank: int, placement: Placement, num_microbatches: int, group_size: int
) -> list[Action]:
    """Return forwards alone, for evaluation and generation."""
    if placement.shape == "loop":
        return _rounds(num_microbatches, placement.num_chunks, group_size)

    # One microbatch enters every second step: a rank's two chunks then never want the same step,
    # since their positions differ by an odd number.
    def step(action: Action) -> int:
        return 2 * action.microbatch + placement.position(rank, action.chunk)

    return sorted(_rounds(num_microbatches, 2, group_size), key=step)


_KINDS: dict[str, Kind] = {"F": "forward", "I": "backward_input", "W": "backward_weight"}


def _unroll(num_microbatches: int, *phases: tuple[int, str]) -> list[Step]:
    """Return each phase's actions, repeated: the n-th of a kind and chunk is for microbatch n.

    A pattern may be written for more microbatches than there are: leaving out all actions of some
    leaves a valid schedule of the others.
    """
    counts: Counter[str] = Counter()
    actions: list[Action] = []
    for repeats, pattern in phases:
        for word in pattern.split() * repeats:
            actions.append(Action(_KINDS[word[0]], counts[word], int(word[1:] or 0)))
            counts[word] += 1
    return [action for action in actions if action.microbatch < num_microbatches]


def _rounds(num_microbatches: int, num_chunks: int, group_size: int) -> list[Action]:
    """Return the forwards of a rank: a group through each chunk, then the next group."""
    return [
        Action("forward", microbatch, chunk)
        for start in range(0, num_microbatches, group_size)
        for chunk in range(num_chunks)
        for microbatch in range(start, min(start + group_size, num_microbatches))
    ]


def _alternate(
    num_microbatches: int,
    warmup: int,
    num_chunks: int = 1,
    group_size: int | None = None,
    *,
    combined: bool = False,
) -> list[Step]:
    """Return ``warmup`` forwards, then forwards and backwards in turn, then backwards alone."""
    forwards = _rounds(num_microbatches, num_chunks, group_size or num_microbatches)
    backwards = [Action("backward", i, num_chunks - 1 - chunk) for _, i, chunk in forwards]
    warmup = min(warmup, len(forwards))
    pairs = [Pair(*both) for both in zip(forwards[warmup:], backwards, strict=False)]
    steady = pairs if combined else [action for pair in pairs for action in parts(pair)]
    return [*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :]]


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank, and where the stages they work on live."""

    name: str
    placement: Placement
    num_microbatches: int
    steps: tuple[tuple[Step, ...], ...]
    """By rank."""
    group_size: int = 1

    @cached_property
    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """The actions of the steps, by rank; of a pair the forward first."""
        return tuple(tuple(part for step in steps for part in parts(step)) for steps in self.steps)

    @cached_property
    def evaluation(self) -> "Schedule":
        """The forwards alone, of the same chunks on the same ranks."""
        lists = [
            forward_only(rank, self.placement, self.num_microbatches, self.group_size)
            for rank in range(self.placement.num_ranks)
        ]
        return replace(self, name=f"{self.name} forward only", steps=tuple(map(tuple, lists)))


@lru_cache(maxsize=64)
def make_schedule(
    name: ScheduleName,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int = 1,
    group_size: int | None = None,
    *,
    combined: bool = False,
) -> Schedule:
    """Return a schedule of all ranks; the same object for the same arguments.

    Args:
        name: one of `SCHEDULES`.
        num_ranks: ranks along the pipeline.
        num_microbatches: microbatches of an iteration on one replica.
        num_chunks: stages per rank: several for ``interleaved``, two for ``zb-v``, else one.
        group_size: see `interleaved`; the number of ranks when absent.
        combined: forwards and backwards in turn are pairs.

    Raises:
        UserError: the schedule does not go with so many chunks, or has no pairs, or the group is
            too small.
    """
    _check_chunks(name, num_chunks)
    if combined and name not in COMBINED:
        raise UserError(
            "--overlap-moe-expert-parallel-comm lets a forward and a backward run beside each "
            f"other, which do not take turns in --pipeline-schedule {name}; use auto, 1f1b or "
            "interleaved"
        )
    group = num_ranks if group_size is None else group_size
    if group < num_ranks:
        raise UserError(
            f"--microbatch-group-size-per-virtual-pipeline-stage ({group}) must be at least "
            f"--pipeline-model-parallel-size ({num_ranks}): a chunk's output comes round to its "
            "rank's next chunk only after so many microbatches"
        )
    placement = Placement(num_ranks, num_chunks, "v" if name == "zb-v" else "loop")
    lists: list[Sequence[Step]] = []
    for rank in range(num_ranks):
        place = (rank, num_ranks, num_microbatches)
        if name == "interleaved":
            lists.append(interleaved(*place, num_chunks, group, combined=combined))
        elif name == "1f1b":
            lists.append(one_forward_one_backward(*place, combined=combined))
        else:
            lists.append(_SIMPLE[name](*place))
    title = f"combined-{name}" if combined else name
    return Schedule(title, placement, num_microbatches, tuple(map(tuple, lists)), group)


_SIMPLE = {
    "gpipe": gpipe,
    "zb-h1": zero_bubble_h1,
    "zb-v": zero_bubble_v,
}


def _check_chunks(name: str, num_chunks: int) -> None:
    schedule = f"--pipeline-schedule {name}"
    chunks = "--num-virtual-stages-per-pipeline-rank"
    if name == "interleaved" and num_chunks < 2:
        raise UserError(
            f"{schedule} needs several stages per rank, and there is one; give {chunks} 2 or more, "
            "or --pipeline-schedule 1f1b"
        )
    if name == "zb-v" and num_chunks != 2:
        raise UserError(
            f"{schedule} needs two stages per rank, and there would be {num_chunks}; leave out "
            f"{chunks} and --num-layers-per-virtual-pipeline-stage, or lay out two per rank"
        )
    if name in ("gpipe", "1f1b", "zb-h1") and num_chunks != 1:
        raise UserError(
            f"{schedule} needs one stage per rank, and there would be {num_chunks}; take "
            f"--pipeline-schedule interleaved{' or zb-v' * (num_chunks == 2)}, or leave out "
            f"{chunks} and --num-layers-per-virtual-pipeline-stage"
        )
