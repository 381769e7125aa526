"""`SAVE/run_status.json`: how the last run in this folder ended, for schedulers and people."""

import json
from pathlib import Path
from typing import Any, Literal

from megatron.core.utils import atomic_path
from megatron.training import stopping
from megatron.training.failing.failure import INTERRUPTED

NAME = "run_status.json"
Reason = Literal["running", "interrupted"] | stopping.Reason
"""A file that says ``running`` after its process is gone: the process was killed. ``interrupted``
is Ctrl-C (SIGINT) where `--exit-signal-handler` does not wait for it."""
RESUBMIT: tuple[Reason, ...] = ("running", "interval", "duration", "signal")
"""Reasons after which the same command, started again, carries on as its user wants."""


class StatusFile:
    """The status of one run.

    Args:
        save: the folder of checkpoints; None for a run that saves nowhere.
        writes: whether this process writes the file; others only know what stands in it.
    """

    def __init__(self, save: str | None, *, writes: bool) -> None:
        self._save, self._writes = save, writes
        self.attempt = 0
        """Restarts before this run."""
        self.checkpoint: Path | None = None
        """The newest checkpoint of this run."""

    def write(self, reason: Reason, iteration: int, message: str | None = None) -> None:
        """Write why the run stopped, and after how many iterations."""
        if self._writes:
            write(
                self._save,
                reason=reason,
                iteration=iteration,
                checkpoint=str(self.checkpoint) if self.checkpoint else None,
                attempt=self.attempt,
                message=message,
            )

    def failed(self, iteration: int, message: str, code: int) -> None:
        """Write that the run ends with an error, or because somebody pressed Ctrl-C."""
        interrupted = code == INTERRUPTED
        self.write("interrupted" if interrupted else "failure", iteration, message)


def write(
    save: str | None,
    *,
    reason: Reason,
    iteration: int,
    checkpoint: str | None,
    attempt: int,
    message: str | None = None,
) -> None:
    """Write the status; nothing when the run saves nowhere.

    Args:
        save: the folder of checkpoints.
        reason: why the run stopped.
        iteration: iterations done.
        checkpoint: folder of the newest checkpoint, if any.
        attempt: restarts before this run.
        message: the error of a failure.
    """
    if save is None:
        return
    status: dict[str, Any] = {
        "reason": reason,
        "iteration": iteration,
        "checkpoint": checkpoint,
        "resubmit": reason in RESUBMIT,
        "attempt": attempt,
    }
    if message is not None:
        status["message"] = message
    with atomic_path(Path(save) / NAME) as path:
        path.write_text(json.dumps(status, indent=2) + "\n", encoding="utf-8")


def attempt(save: str | None) -> int | None:
    """Return the attempt of the last run in a folder, or None without one."""
    try:
        return int(_read(save)["attempt"])
    except (ValueError, KeyError, TypeError):
        return None  # somebody else's file


def is_complete(save: str | None) -> bool:
    """Return whether the status in a folder says that its last run was complete."""
    return _read(save).get("reason") == "complete"


def _read(save: str | None) -> dict[str, Any]:
    """Return what stands in the status of a folder; nothing if it has none, or no object."""
    path = Path(save) / NAME if save else None
    if path is None or not path.exists():
        return {}
    try:
        status = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return {}
    return status if isinstance(status, dict) else {}
