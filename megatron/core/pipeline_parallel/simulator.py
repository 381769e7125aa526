"""The time a schedule takes and what it holds, found by playing its lists through; no torch.

A rank does its steps in order, each as soon as its inputs are there; a message between ranks
takes ``transfer``, and the sender does not wait. A pair takes as long as its two actions would one
after the other: that tokens travel beside it is no matter of a schedule. The costs are of one
microbatch through all that a rank holds: with several chunks each takes its share, so that
schedules compare on equal work.

Bubble is what the pipeline takes longer than its busiest rank works, as a share of that work. For
m microbatches on p ranks with v chunks each it is (p-1)/m under GPipe and 1F1B, and (p-1)/(vm)
interleaved (Narayanan et al., 2021, arXiv:2104.04473).
"""

from dataclasses import dataclass
from typing import NamedTuple

from megatron.core.pipeline_parallel.actions import Action, Step, parts
from megatron.core.pipeline_parallel.messages import Need, made, requirements, without
from megatron.core.pipeline_parallel.schedules import Schedule


class Deadlock(Exception):
    """No rank can go on; the message names the step that each stands before."""


@dataclass(frozen=True)
class Costs:
    """Time of one microbatch on one rank, and of a message between two ranks."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    transfer: float = 0.0

    def of(self, step: Step, num_chunks: int) -> float:
        """Return the time of a step."""
        return sum(self._of_one(part, num_chunks) for part in parts(step))

    def _of_one(self, action: Action, num_chunks: int) -> float:
        if action.kind == "backward":
            whole = self.backward_input + self.backward_weight
        else:
            whole = getattr(self, action.kind)
        return whole / num_chunks


class Span(NamedTuple):
    """A step and when it ran."""

    step: Step
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When every step of a schedule ran."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]
    """By rank."""

    @property
    def makespan(self) -> float:
        """Return the time from the first start to the last end."""
        return max((spans[-1].end for spans in self.spans if spans), default=0.0)

    def busy(self, rank: int) -> float:
        """Return the time that a rank works."""
        return sum(span.end - span.start for span in self.spans[rank])

    @property
    def bubble(self) -> float:
        """Return the share by which the pipeline takes longer than its busiest rank works."""
        ideal = max(self.busy(rank) for rank in range(len(self.spans)))
        return self.makespan / ideal - 1 if ideal else 0.0

    def live(self, rank: int) -> list[tuple[float, float]]:
        """Return (time, microbatches alive from then on) for a rank, whenever that changes.

        A microbatch lives from the start of its forward to the end of its backward, or of its
        weight gradients; in one of v chunks it counts 1/v.
        """
        changes: dict[float, int] = {}
        for step, start, end in self.spans[rank]:
            for action in parts(step):
                if action.kind == "forward":
                    changes[start] = changes.get(start, 0) + 1
                elif action.kind != "backward_input":
                    changes[end] = changes.get(end, 0) - 1
        alive, steps = 0, []
        for time in sorted(changes):
            alive += changes[time]
            steps.append((time, alive / self.schedule.placement.num_chunks))
        return steps

    def peak(self, rank: int) -> float:
        """Return the most microbatches that are alive at once on a rank."""
        return max((alive for _, alive in self.live(rank)), default=0.0)


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Return when each step runs.

    Raises:
        Deadlock: the lists cannot be finished.
    """
    costs, placement = costs or Costs(), schedule.placement
    spans: list[list[Span]] = [[] for _ in schedule.actions]
    # When what a step needs is there: messages, and this rank's own earlier work.
    ready: dict[Need, float] = {}
    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(schedule.steps):
            for step in steps[len(spans[rank]) :]:
                needs = requirements(placement, rank, step)
                if any(need not in ready for need in needs):
                    break
                clock = spans[rank][-1].end if spans[rank] else 0.0
                start = max([clock, *(ready[need] for need in needs)])
                end = start + costs.of(step, placement.num_chunks)
                spans[rank].append(Span(step, start, end))
                for action in parts(step):
                    ready[rank, action] = end
                    message = made(placement, rank, action)
                    if message is not None:
                        local = placement.owner(message.target)[0] == rank
                        ready[message] = end if local else end + costs.transfer
                moved = True
    stuck = {
        rank: steps[len(spans[rank])]
        for rank, steps in enumerate(schedule.steps)
        if len(spans[rank]) < len(steps)
    }
    if stuck:
        waits = [
            f"rank {rank} stands before {step}{without(placement, rank, step, ready)}"
            for rank, step in stuck.items()
        ]
        raise Deadlock(f"schedule {schedule.name} cannot be finished: {'; '.join(waits)}")
    return Timeline(schedule, tuple(map(tuple, spans)))
