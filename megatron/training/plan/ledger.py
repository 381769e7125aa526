"""What parts of a chunk hold, one after the other, and the fullest moment of their backward.

Forward adds part after part; backward begins with the last one and lets each go in turn. On the way
more appears: what a recomputed part makes again, what is fetched from the host, and, where weights'
gradients are put off, what these hold on to.
"""

from dataclasses import dataclass, field
from itertools import accumulate


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


@dataclass
class Ledger:
    """The parts of a chunk in the order of their forward, and what each adds."""

    splits: bool
    """Weights' gradients are put off: what they hold on to stays."""
    kept: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    moments: list[tuple[int, int, int]] = field(default_factory=list)
    """(bytes, part with whose backward they appear, part with whose backward they go)."""
    groups: list[tuple[int, int, int]] = field(default_factory=list)
    """What is offloaded: (bytes, part that needs it first in backward, part that needs it last).
    It is fetched when the group after it is, but for the last one."""

    def add(self, kept: int, late: int = 0) -> int:
        """Add a part, and return its number."""
        self.kept.append(kept)
        self.late.append(late)
        return len(self.kept) - 1

    def footprint(self, working: int) -> Footprint:
        """Return the sums."""
        kept, late = sum(self.kept), sum(self.late)
        host = sum(size for size, _, _ in self.groups)
        return Footprint(kept, late, working, self._most() - kept, host)

    def _most(self) -> int:
        """Return the bytes at the fullest moment of a backward, weights' gradients left out."""
        moments = list(self.moments)
        after: int | None = None  # the part that needs the group after
        for size, needed, gone in reversed(self.groups):
            moments.append((size, needed if after is None else after, gone))
            after = needed
        steps = [0] * (len(self.kept) + 1)
        for size, made, gone in moments:
            steps[gone] += size
            steps[made + 1] -= size
        most = late = 0
        parts = list(zip(accumulate(self.kept), accumulate(steps), self.late, strict=False))
        for before, there, own in reversed(parts):
            most = max(most, before + there + late)
            late += own if self.splits else 0
        return max(most, late)
