"""A signal that asks for a clean stop.

Only installed when `--exit-signal-handler` asks for it; otherwise signals keep their default action
and end the process at once. The handler just sets a mark: the loop looks at it at the end of an
iteration, all ranks agree there (the signal may have reached one of them only), save once and stop.
The second signal of the same kind has the default action again, for people who cannot wait.
"""

import signal
from types import FrameType, TracebackType
from typing import Self


class ExitSignal:
    """Remembers that a signal arrived, while it is entered."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.received = False
        self._previous: object = None

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
        self.received = True
        signal.signal(self.number, signal.SIG_DFL)
