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
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from megatron.core.pipeline_parallel.placement import Placement
from megatron.core.utils import UserError

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]
ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]
SCHEDULES: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")


class Action(NamedTuple):
    """One unit of pipeline work: what is done to a microbatch in a chunk."""

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}(microbatch {self.microbatch}, chunk {self.chunk})"


def gpipe(stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """Return all forwards, then all backwards: every microbatch is alive at once."""
    return _alternate(num_microbatches, num_microbatches)


def one_forward_one_backward(stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """Return the 1F1B order: warm up, alternate, drain.

    A stage may run ahead of its first backward by the number of stages after it, so at most
    ``num_stages - stage`` microbatches are alive at once.
    """
    return _alternate(num_microbatches, num_stages - stage - 1)


def interleaved(
    rank: int, num_ranks: int, num_microbatches: int, num_chunks: int, group_size: int
) -> list[Action]:
    """Return Megatron's interleaved 1F1B order over the chunks of a rank.

    ``group_size`` microbatches pass through a chunk before its rank turns to the next chunk. A rank
    runs ahead by its group through all chunks but the last, and by two more actions for each rank
    after it, so that its alternation meets its neighbour's.

    The last group may be smaller. Where it has fewer microbatches than there are ranks, strict
    alternation would wait for itself (Megatron-LM refuses such counts): the order is then that of a
    full round of ranks, without the microbatches that are not there.
    """
    warmup = 2 * (num_ranks - rank - 1) + (num_chunks - 1) * group_size
    missing = num_ranks - num_microbatches % group_size
    total = num_microbatches + (missing if 0 < missing < num_ranks else 0)
    return [
        action
        for action in _alternate(total, warmup, num_chunks, group_size)
        if action.microbatch < num_microbatches
    ]


def zero_bubble_h1(stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
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


def zero_bubble_v(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
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


def _unroll(num_microbatches: int, *phases: tuple[int, str]) -> list[Action]:
    """Return each phase's actions, repeated: the n-th of a kind and chunk is for microbatch n.

    A pattern may be written for more microbatches than there are: leaving out all actions of some
    leaves a valid schedule of the others.
    """
    counts: Counter[str] = Counter()
    actions = []
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
    num_microbatches: int, warmup: int, num_chunks: int = 1, group_size: int | None = None
) -> list[Action]:
    """Return ``warmup`` forwards, then forwards and backwards in turn, then backwards alone."""
    forwards = _rounds(num_microbatches, num_chunks, group_size or num_microbatches)
    backwards = [Action("backward", i, num_chunks - 1 - chunk) for _, i, chunk in forwards]
    warmup = min(warmup, len(forwards))
    steady = [action for pair in zip(forwards[warmup:], backwards, strict=False) for action in pair]
    return forwards[:warmup] + steady + backwards[len(forwards) - warmup :]


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank, and where the stages they work on live."""

    name: str
    placement: Placement
    num_microbatches: int
    actions: tuple[tuple[Action, ...], ...]
    """By rank."""
    group_size: int = 1

    @cached_property
    def evaluation(self) -> "Schedule":
        """The forwards alone, of the same chunks on the same ranks."""
        lists = [
            forward_only(rank, self.placement, self.num_microbatches, self.group_size)
            for rank in range(self.placement.num_ranks)
        ]
        return replace(self, name=f"{self.name} forward only", actions=tuple(map(tuple, lists)))


@lru_cache(maxsize=64)
def make_schedule(
    name: ScheduleName,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int = 1,
    group_size: int | None = None,
) -> Schedule:
    """Return a schedule of all ranks; the same object for the same arguments.

    Args:
        name: one of `SCHEDULES`.
        num_ranks: ranks along the pipeline.
        num_microbatches: microbatches of an iteration on one replica.
        num_chunks: stages per rank: several for ``interleaved``, two for ``zb-v``, else one.
        group_size: see `interleaved`; the number of ranks when absent.

    Raises:
        UserError: the schedule does not go with so many chunks, or the group is too small.
    """
    _check_chunks(name, num_chunks)
    group = num_ranks if group_size is None else group_size
    if group < num_ranks:
        raise UserError(
            f"--microbatch-group-size-per-virtual-pipeline-stage ({group}) must be at least "
            f"--pipeline-model-parallel-size ({num_ranks}): a chunk's output comes round to its "
            "rank's next chunk only after so many microbatches"
        )
    placement = Placement(num_ranks, num_chunks, "v" if name == "zb-v" else "loop")
    lists: list[Sequence[Action]] = []
    for rank in range(num_ranks):
        if name == "interleaved":
            lists.append(interleaved(rank, num_ranks, num_microbatches, num_chunks, group))
        else:
            lists.append(_SIMPLE[name](rank, num_ranks, num_microbatches))
    return Schedule(name, placement, num_microbatches, tuple(map(tuple, lists)), group)


_SIMPLE = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
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
