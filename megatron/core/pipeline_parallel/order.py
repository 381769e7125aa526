"""The transfers of a schedule in an order that cannot deadlock, woven into every rank's actions.

A send needs its receiver: neither gloo nor NCCL buffers. And what a rank posts on a channel runs in
the order of posting; on one NCCL communicator even transfers with different peers do. So two ranks
that post in different orders, or wait at the wrong moment, wait for ever.

There is one order of all transfers of the pipeline: by the time at which a simulation with nominal
costs makes them. Every rank posts its own in that order, a send as soon as it is made, a receive
``prefetch`` actions before it is needed. Of the transfers under way, the first in the order has
both its ends posted or about to be: whatever they still do first needs only earlier ones. So it
ends, whatever the real costs. A pair of ranks sees one order for both directions; hops between
chunks of one rank are no transfers.

`check` plays programs through under these rules, and names what each rank stands before.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from megatron.core.pipeline_parallel.actions import Action, Pair, Step, parts
from megatron.core.pipeline_parallel.messages import (
    Message,
    Need,
    made,
    needed,
    requirements,
    without,
)
from megatron.core.pipeline_parallel.schedules import Schedule
from megatron.core.pipeline_parallel.simulator import Costs, Deadlock, Timeline, simulate


class Post(NamedTuple):
    """Start a transfer."""

    message: Message
    peer: int
    """Rank at the other end."""
    sends: bool

    def __str__(self) -> str:
        return f"{'send to' if self.sends else 'receive from'} rank {self.peer} of {self.message}"


class Release(NamedTuple):
    """Wait for a send, and free what it sent."""

    message: Message

    def __str__(self) -> str:
        return f"release of {self.message}"


Instruction = Step | Post | Release
Program = tuple[Instruction, ...]


class Transfer(NamedTuple):
    """A message between two ranks."""

    message: Message
    source: int
    target: int


def transfers(timeline: Timeline) -> list[Transfer]:
    """Return every transfer of a schedule in the one order that all ranks follow."""
    placement = timeline.schedule.placement
    found = []
    for rank, spans in enumerate(timeline.spans):
        for step, _, end in spans:
            for action in parts(step):
                message = made(placement, rank, action)
                target = rank if message is None else placement.owner(message.target)[0]
                if message is not None and target != rank:
                    found.append((end, Transfer(message, rank, target)))
    return [transfer for _, transfer in sorted(found)]


def programs(schedule: Schedule, prefetch: int = 1) -> tuple[Program, ...]:
    """Return what each rank does: its actions, with transfers posted and released in between.

    A program whose transfers are waited for as soon as they are posted needs ``prefetch`` 0.

    Raises:
        Deadlock: the schedule itself cannot be finished.
    """
    timeline = simulate(schedule, Costs())
    ordered = transfers(timeline)
    points = [_points(timeline, rank, ordered, prefetch) for rank in range(len(timeline.spans))]
    result = []
    for rank, spans in enumerate(timeline.spans):
        posts: list[list[Instruction]] = [[] for _ in range(len(spans) + 1)]
        releases: list[list[Instruction]] = [[] for _ in range(len(spans) + 1)]
        for message, source, target in ordered:
            if rank not in (source, target):
                continue
            sends, point = rank == source, points[rank][message]
            posts[point].append(Post(message, target if sends else source, sends))
            if sends:
                there = _boundary(timeline, target, points[target][message])
                # Not at once: the next action hides the transfer. Nor before the receiver is
                # nominally ready, or this rank would stand still.
                later = point + 1
                while later < len(spans) and spans[later].start < there:
                    later += 1
                releases[min(later, len(spans))].append(Release(message))
        instructions: list[Instruction] = []
        for index, span in enumerate(spans):
            instructions += [*posts[index], *releases[index], span.step]
        result.append((*instructions, *posts[-1], *releases[-1]))
    return tuple(result)


def _points(
    timeline: Timeline, rank: int, ordered: Sequence[Transfer], prefetch: int
) -> dict[Message, int]:
    """Return the number of actions that a rank has done when it posts each of its transfers."""
    placement = timeline.schedule.placement
    maker: dict[Message | None, int] = {}
    taker: dict[Message | None, int] = {}
    for index, span in enumerate(timeline.spans[rank]):
        for action in parts(span.step):
            maker[made(placement, rank, action)] = index
            taker[needed(placement, rank, action)] = index
    mine = [transfer for transfer in ordered if rank in (transfer.source, transfer.target)]
    points = []
    for message, source, _ in mine:
        points.append(maker[message] + 1 if source == rank else max(0, taker[message] - prefetch))
    # Keep to the order: a receive that comes before a send must not hold it up, and one that comes
    # after a send cannot be posted before it.
    for k in reversed(range(len(mine) - 1)):
        if mine[k].target == rank:
            points[k] = min(points[k], points[k + 1])
    for k in range(1, len(mine)):
        points[k] = max(points[k], points[k - 1])
    for (message, source, _), point in zip(mine, points, strict=True):
        on_time = point == maker[message] + 1 if source == rank else point <= taker[message]
        assert on_time, f"rank {rank} would post {message} after {point} actions"
    return {transfer.message: point for transfer, point in zip(mine, points, strict=True)}


def _boundary(timeline: Timeline, rank: int, point: int) -> float:
    """Return when a rank has done ``point`` actions."""
    return timeline.spans[rank][point - 1].end if point else 0.0


def check(schedule: Schedule, ranks: Sequence[Program], *, blocking: bool = False) -> None:
    """Play programs through: transfers are unbuffered, and a rank's run one after the other.

    Args:
        schedule: whose stages the programs work on.
        ranks: the program of every rank.
        blocking: each transfer is waited for as soon as it is posted.

    Raises:
        Deadlock: with the instruction that every rank stands before.
    """
    player = _Player(schedule, ranks, blocking)
    while player.advance() + player.complete():
        pass
    stuck = player.stuck()
    if stuck:
        raise Deadlock(f"the transfers of {schedule.name} wait for each other: {'; '.join(stuck)}")


class _Player:
    """Where every rank stands in its program, and what it has posted."""

    def __init__(self, schedule: Schedule, ranks: Sequence[Program], blocking: bool) -> None:
        self.placement, self.ranks, self.blocking = schedule.placement, ranks, blocking
        self.at = [0] * len(ranks)
        self.posted: list[deque[Message]] = [deque() for _ in ranks]
        self.there: list[set[Need]] = [set() for _ in ranks]

    def advance(self) -> int:
        """Let every rank go as far as it can; return the number of instructions done."""
        before = sum(self.at)
        for rank, program in enumerate(self.ranks):
            while self.at[rank] < len(program) and self._may_pass(rank, program[self.at[rank]]):
                self._do(rank, program[self.at[rank]])
                self.at[rank] += 1
        return sum(self.at) - before

    def complete(self) -> int:
        """End each transfer that is the first of both its ranks; return their number."""
        ended = 0
        for rank, queue in enumerate(self.posted):
            for peer in range(rank):
                if queue and self.posted[peer] and queue[0] == self.posted[peer][0]:
                    message = queue.popleft()
                    self.posted[peer].popleft()
                    self.there[rank].add(message)
                    self.there[peer].add(message)
                    ended += 1
        return ended

    def _may_pass(self, rank: int, instruction: Instruction) -> bool:
        if self.blocking and self.posted[rank]:
            return False
        if isinstance(instruction, Action | Pair):
            needs = requirements(self.placement, rank, instruction)
            return all(need in self.there[rank] for need in needs)
        if isinstance(instruction, Release):
            return instruction.message not in self.posted[rank]
        return not instruction.sends or instruction.message in self.there[rank]

    def _do(self, rank: int, instruction: Instruction) -> None:
        if isinstance(instruction, Post):
            self.posted[rank].append(instruction.message)
        elif isinstance(instruction, Action | Pair):
            for action in parts(instruction):
                message = made(self.placement, rank, action)
                self.there[rank] |= {(rank, action), *([message] if message is not None else [])}

    def stuck(self) -> list[str]:
        """Return what each rank that is not at its end stands before."""
        found = []
        for rank, program in enumerate(self.ranks):
            instruction = program[self.at[rank]] if self.at[rank] < len(program) else None
            if instruction is None and not self.posted[rank]:
                continue
            words = f"rank {rank} stands before {instruction or 'its end'}"
            if isinstance(instruction, Action | Pair):
                words += without(self.placement, rank, instruction, self.there[rank])
            if self.posted[rank]:
                words += f", its transfer under way is the {self.posted[rank][0]}"
            found.append(words)
        return found
