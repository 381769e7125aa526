"""How far a long job has come: a bar that redraws on a terminal, plain lines in a log file."""

import sys
import time
from collections.abc import Callable
from typing import TextIO

BAR = 20
"""Characters of the bar."""
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


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}"
