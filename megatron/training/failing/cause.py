"""Who is to blame when a run ends: what the ranks were at, and what all of them are told."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron.training.failing.failure import Failure

Message = dict[str, Any]
Kind = Literal["failed", "died", "stalled", "absent"]
DIED = "died without a word: it was killed, or its machine went down"


@dataclass
class Beat:
    """The last sign of life of a rank."""

    doing: str = "starting"
    age: float = 0.0
    """Seconds since it began that, when it said so."""
    is_waiting: bool = False
    """For other ranks."""
    is_overdue: bool = False
    """A timed step that takes too long."""
    heard: float = field(default_factory=time.monotonic)

    @property
    def silence(self) -> float:
        """Return the seconds since then."""
        return time.monotonic() - self.heard


def is_frozen(beat: Beat, interval: float) -> bool:
    """Return whether a rank that should say something every ``interval`` seconds does not."""
    return beat.silence > 3 * interval


def culprit(beats: Mapping[int, Beat], interval: float) -> int:
    """Return the rank that all others seem to wait for.

    It is among those that do not wait in a collective (or can no longer say so), if there are any;
    of these, and else of all, the one that has begun nothing new for longest.
    """
    busy = [
        rank for rank, beat in beats.items() if not beat.is_waiting or is_frozen(beat, interval)
    ]
    return max(busy or beats, key=lambda rank: (beats[rank].age + beats[rank].silence, -rank))


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Why a run ends, as all ranks are told."""

    kind: Kind
    rank: int
    printer: int
    """The rank that prints it."""
    title: str
    """One line that names the rank and what it was at."""
    failure: Failure | None
    """What the rank said itself."""
    when: float

    @property
    def code(self) -> int:
        """Return the exit code of all ranks."""
        return self.failure.code if self.failure else 1

    @property
    def is_plain(self) -> bool:
        """Return whether the rank's message says it all."""
        return self.failure is not None and self.failure.is_plain

    def to_json(self) -> Message:
        """Return it as it travels."""
        return {**self.__dict__, "failure": self.failure and self.failure.to_json()}

    @classmethod
    def from_json(cls, message: Message) -> "Cause":
        """Return what `to_json` gave."""
        said = message.pop("failure")
        return cls(**message, failure=said and Failure(**said))


def last_sign(beat: Beat) -> str:
    """Return what is known of a rank that does not speak any more."""
    return f"last heartbeat {beat.silence:.1f} s ago: {beat.doing}"


def named(places: Sequence[str], rank: int) -> str:
    """Return how a message begins that is about a rank: its coordinates and number."""
    return f"{places[rank]} rank {rank}"
