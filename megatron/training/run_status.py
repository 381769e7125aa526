"""`SAVE/run_status.json`: how the last run in this folder ended, for schedulers and people."""

import json
from pathlib import Path
from typing import Any

from megatron.core.utils import atomic_path

NAME = "run_status.json"


def write(
    save: str | None,
    *,
    reason: str,
    iteration: int,
    checkpoint: str | None,
    resubmit: bool,
    attempt: int,
    message: str | None = None,
) -> None:
    """Write the status; nothing when the run saves nowhere.

    Args:
        save: the folder of checkpoints.
        reason: ``complete``, ``interval``, ``duration``, ``signal``, ``stop file`` or ``failure``.
        iteration: iterations done.
        checkpoint: folder of the newest checkpoint, if any.
        resubmit: starting the same command again would carry on.
        attempt: restarts before this run.
        message: the error of a failure.
    """
    if save is None:
        return
    status: dict[str, Any] = {
        "reason": reason,
        "iteration": iteration,
        "checkpoint": checkpoint,
        "resubmit": resubmit,
        "attempt": attempt,
    }
    if message is not None:
        status["message"] = message
    with atomic_path(Path(save) / NAME) as path:
        path.write_text(json.dumps(status, indent=2) + "\n", encoding="utf-8")
