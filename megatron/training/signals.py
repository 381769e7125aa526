"""A signal that asks for a clean stop.

Only installed when `--exit-signal-handler` asks for it; otherwise signals keep their default action
and end the process at once. The handler just sets a mark: the loop looks at it at the end of an
iteration, all ranks agree there (the signal may have reached one of them only), save once and stop.
A signal of the same kind that comes later has the default action, for people who cannot wait. Those
that follow at once are the same request: a scheduler signals every process of a job, and torchrun
passes on to its processes what it got itself.
"""

import os
import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

ONE_REQUEST = 5.0
"""Seconds in which further signals are taken for the first one."""


class ExitSignal:
    """Remembers that a signal arrived, while it is entered."""

    def __init__(self, number: int, now: Callable[[], float] = time.monotonic) -> None:
        self.number, self._now = number, now
        self._first: float | None = None
        self._previous: object = None

    @property
    def received(self) -> bool:
        """Return whether the signal has arrived."""
        return self._first is not None

    def __enter__(self) -> Self:
        self._previous = signal.signal(self.number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.signal(self.number, self._previous)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._first is None:
            self._first = self._now()
        elif self._now() - self._first > ONE_REQUEST:
            signal.signal(self.number, signal.SIG_DFL)
            os.kill(os.getpid(), self.number)
