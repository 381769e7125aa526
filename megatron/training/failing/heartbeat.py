"""What a process is at: its main thread writes it down, its watchdog reads it."""

import math


class Pulse:
    """The last step that the main thread has begun.

    Steps are either timed, parts of an iteration or an evaluation, of which none may take longer
    than `limit`, or may take as long as they like: index building, loading, saving.

    Args:
        limit: seconds that a timed step may take.
    """

    def __init__(self, limit: float = math.inf) -> None:
        self.limit = limit
        self._step: tuple[str, object, bool] = ("starting", None, False)

    def timed(self, what: str) -> None:
        """Begin a phase whose steps must not take too long."""
        self._step = (what, None, True)

    def untimed(self, what: str) -> None:
        """Begin a phase that may be slow."""
        self._step = (what, None, False)

    def action(self, action: object) -> None:
        """Begin a step of the phase; costs next to nothing."""
        what, _, timed = self._step
        self._step = (what, action, timed)

    @property
    def step(self) -> tuple[str, object, bool]:
        """Return the step: a new object whenever one has begun."""
        return self._step

    @property
    def is_timed(self) -> bool:
        """Return whether the step must not take too long."""
        return self._step[2]

    def __str__(self) -> str:
        what, action, _ = self._step
        return what if action is None else f"{what}, last action {action}"
