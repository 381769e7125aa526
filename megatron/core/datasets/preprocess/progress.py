"""Progress of a long job: a bar that redraws on a terminal, plain lines in a log file."""

import sys
import time
from typing import TextIO

from megatron.core.utils import human_bytes


class Progress:
    """Tells how far a job has come, in bytes of its input.

    Args:
        total: bytes of the whole input.
        every: records between lines, where the output is no terminal.
        stream: where to print; standard error by default, so that piped output stays clean.
    """

    def __init__(self, total: int, every: int, stream: TextIO | None = None) -> None:
        self.total = max(total, 1)
        self.every = every
        self.stream = stream or sys.stderr
        self.is_terminal = self.stream.isatty()
        self.started = time.monotonic()
        self._shown_at = 0.0
        self._shown_records = 0

    def update(self, done: int, records: int, tokens: int) -> None:
        """Show the state, unless it was shown a moment ago."""
        now = time.monotonic()
        # A log gets a line every so many records, but never more than one per second.
        pause = 0.2 if self.is_terminal else 1.0
        due = self.is_terminal or records - self._shown_records >= self.every
        if not due or now - self._shown_at < pause:
            return
        self._shown_at, self._shown_records = now, records
        seconds = max(now - self.started, 1e-9)
        share = min(done / self.total, 1.0)
        left = seconds * (1 - share) / share if share else 0.0
        text = (
            f"{share:6.1%} | {records} records ({records / seconds:.0f}/s) | {tokens} tokens "
            f"({tokens / seconds:.0f}/s) | {human_bytes(done / seconds)}/s | "
            f"{_clock(left)} left"
        )
        if self.is_terminal:
            width = 20
            bar = "#" * round(share * width)
            self.stream.write(f"\r\x1b[2K[{bar:<{width}}] {text}")
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
