"""What parts of a chunk hold, one after the other, and the fullest moment of their backward.

Forward adds part after part; backward begins with the last one and lets each go in turn. On the way
more appears: what a recomputed part makes again, what is fetched from the host, and, where weights'
gradients are put off, what these hold on to.

A forward and a backward that are a pair take turns at the parts before which they wait for rows
(`core/turns`), so that one grows while the other shrinks (`beside`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from megatron.training.plan.passing import Passing


@dataclass(frozen=True)
class Footprint:
    """Bytes of one microbatch in one chunk of a model."""

    kept: int
    """From its forward to its backward, on the device."""
    postponed: int
    """From the backward of its inputs to that of its weights."""
    working: int
    """For a moment, by the microbatch at work."""
    backward: int = 0
    """What it has above ``kept`` at the fullest moment of its backward."""
    host: int = 0
    """In host memory."""
    together: tuple[int, int] = (0, 0)
    """The same as ``backward``, of activations and communication together: of a backward that
    begins without gradients, and of one that finds all of them (`passing`)."""
    grown: tuple[int, ...] = ()
    """What a forward has kept whenever it waits for rows, and at its end."""
    shrunk: tuple[tuple[int, int], ...] = ()
    """(The most that a backward has before it waits for rows, what is left then), each time and at
    its end."""


def beside(forward: Footprint, backward: Footprint) -> int:
    """Return the most bytes that a forward and a backward have together which take turns."""
    most = held = 0
    for turn in range(max(len(forward.grown), len(backward.shrunk))):
        top, left = backward.shrunk[turn] if turn < len(backward.shrunk) else (0, 0)
        most = max(most, held + top)
        if turn < len(forward.grown):
            held = forward.grown[turn]
        ends = turn + 1 == len(forward.grown)
        most = max(most, held + left + (forward.working if ends else 0))
    return most


@dataclass
class Ledger:
    """The parts of a chunk in the order of their forward, and what each adds."""

    splits: bool
    """Weights' gradients are put off: what they hold on to stays."""
    unit: str = ""
    """The unit of the model that what is added next belongs to."""
    delays: bool = False
    """Weights' gradients are put off until the backward waits for rows."""
    kept: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    units: list[str] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    """Parts before which a forward waits for rows."""
    waits_back: list[int] = field(default_factory=list)
    """Parts before whose backward it waits for gradients of rows."""
    moments: list[tuple[int, int, int]] = field(default_factory=list)
    """(bytes, part with whose backward they appear, part with whose backward they go)."""
    groups: list[tuple[int, int, int]] = field(default_factory=list)
    """What is offloaded: (bytes, part that needs it first in backward, part that needs it last).
    It is fetched when the group after it is, but for the last one."""

    def add(self, kept: int, late: int = 0) -> int:
        """Add a part, and return its number."""
        self.kept.append(kept)
        self.late.append(late)
        self.units.append(self.unit)
        return len(self.kept) - 1

    def footprint(self, working: int, passing: Passing) -> Footprint:
        """Return the sums, given what a backward has for communication."""
        kept, late = sum(self.kept), sum(self.late)
        host = sum(size for size, _, _ in self.groups)
        backward = self._most(Passing(), {}) - kept
        first, later = (
            max(self._most(passing, during) - kept, working + during.get("output_layer", 0))
            for during in (passing.during, passing.later)
        )
        grown = [*accumulate(self.kept, initial=0)]
        return Footprint(
            kept,
            late,
            working,
            backward,
            host,
            (first, later),
            tuple(grown[part] for part in [*self.waits, len(self.kept)]),
            tuple(self._shrunk()),
        )

    def _shrunk(self) -> Iterator[tuple[int, int]]:
        """Yield what a backward has between its waits; see `Footprint.shrunk`."""
        most = 0
        for part, level, before in self._levels():
            if part in self.waits_back:
                yield most, before
                most = 0
            most = max(most, level)
        yield most, 0

    def _most(self, passing: Passing, during: Mapping[str, int]) -> int:
        """Return the bytes at the fullest moment of a backward, weights' gradients left out.

        Args:
            passing: what is there for communication.
            during: of it, what is there while a unit's backward goes on.
        """
        most, unit = 0, ""
        for part, level, before in self._levels():
            if self.units[part] != unit:
                unit = self.units[part]
                most = max(most, before + passing.before.get(unit, 0))
            most = max(most, level + during.get(unit, 0))
        return max(most, sum(self.late) * self.splits + passing.end)

    def _levels(self) -> Iterator[tuple[int, int, int]]:
        """Yield each part, the bytes in its backward, and those before it makes anything again."""
        moments = list(self.moments)
        after: int | None = None  # the part that needs the group after
        for size, needed, gone in reversed(self.groups):
            moments.append((size, needed if after is None else after, gone))
            after = needed
        steps, new = [0] * (len(self.kept) + 1), [0] * len(self.kept)
        for size, made, gone in moments:
            new[made] += size
            steps[gone] += size
            steps[made + 1] -= size
        late = 0
        kept, there = [*accumulate(self.kept)], [*accumulate(steps)]
        for part in reversed(range(len(kept))):
            if self.delays and part in self.waits_back:
                late = 0
            level = kept[part] + there[part] + late
            yield part, level, level - new[part]
            late += self.late[part] if self.splits or self.delays else 0
