"""How far a long job has come: a bar that redraws on a terminal, plain lines in a log file."""

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TextIO

from megatron.core.utils import human_bytes

BAR = 20
"""Characters of the bar."""
LINES = 100
"""Most lines that the bytes of a job make in a log file."""
PIECE = 2**24
"""Bytes that are handled at a time, about."""
QUIET = 1.0
"""Seconds that such a job may take before it tells how far it is."""
PAUSE = {True: 0.2, False: 1.0}
"""Least seconds between two states: on a terminal, in a log file."""


class Progress:
    """Tells the share that is done, the time that is left, and what the job says of itself.

    Args:
        total: the whole amount of work, in any unit.
        every: steps between lines, where the output is no terminal.
        stream: where to print; standard error by default, so that piped output stays clean.
    """

    def __init__(self, total: float, every: int = 1, stream: TextIO | None = None) -> None:
        self.total = max(total, 1)
        self.every = every
        self.stream = stream or sys.stderr
        self.is_terminal = self.stream.isatty()
        self.started = time.monotonic()
        self._shown_at = 0.0
        self._shown_step = 0

    def update(self, done: float, step: int, detail: Callable[[float], str]) -> None:
        """Show the state, unless it was shown a moment ago.

        Args:
            done: the amount of work done.
            step: the number of steps done, which `every` counts.
            detail: what else to say, given the seconds since the start.
        """
        now = time.monotonic()
        due = self.is_terminal or step - self._shown_step >= self.every
        if not due or now - self._shown_at < PAUSE[self.is_terminal]:
            return
        self._shown_at, self._shown_step = now, step
        seconds = max(now - self.started, 1e-9)
        share = min(done / self.total, 1.0)
        left = seconds * (1 - share) / share if share else 0.0
        text = f"{share:6.1%} | {detail(seconds)} | {_clock(left)} left"
        if self.is_terminal:
            bar = "#" * round(share * BAR)
            self.stream.write(f"\r\x1b[2K[{bar:<{BAR}}] {text}")
        else:
            self.stream.write(text.strip() + "\n")
        self.stream.flush()

    def close(self) -> None:
        """Clear the bar."""
        if self.is_terminal:
            self.stream.write("\r\x1b[2K")
            self.stream.flush()


Told = Callable[[str, int], None]
"""Hears of each piece that is done: the tensor it is of, and its bytes."""


def untold(key: str, size: int) -> None:
    """Tell nobody."""


class Bar(AbstractContextManager["Bar"]):
    """Progress of a job over bytes: called with a tensor and a size when so much is done.

    Args:
        total: bytes of the whole job.
        verb: what is done to them, in the past tense.
        also: called each time, too.
    """

    def __init__(self, total: int, verb: str, also: Callable[[], None] = lambda: None) -> None:
        self._progress = Progress(total, every=max(total // PIECE // LINES, 1))
        self.done = 0
        self._verb, self._also, self._steps = verb, also, 0
        self._quiet_until = time.monotonic() + QUIET

    def __call__(self, key: str, size: int) -> None:
        self.done += size
        self._steps += 1
        self._also()

        def detail(seconds: float) -> str:
            done = human_bytes(self.done)
            return f"{self._verb} {done}, {human_bytes(self.done / seconds)}/s, {key}"

        if time.monotonic() > self._quiet_until:
            self._progress.update(self.done, self._steps, detail)

    def __exit__(self, *_: object) -> None:
        self._progress.close()


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}"
