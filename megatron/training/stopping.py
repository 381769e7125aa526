"""When a run stops before its last iteration.

The reasons are looked at after each iteration. Those that ranks may see differently (a signal, the
clock, a file) travel with the iteration's totals, so that all ranks stop at the same one.

    interval    --exit-interval divides the iteration
    duration    --exit-duration-in-mins is over; `auto` is Slurm's end time less the time of a save
    signal      --exit-signal-handler saw --exit-signal
    stop file   a file SAVE/stop exists, for people without job control; it is removed when obeyed
"""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from megatron.core.utils import UserError
from megatron.training.loop_config import TrainingConfig
from megatron.training.signals import ExitSignal

Reason = Literal["complete", "interval", "duration", "signal", "stop file", "failure"]
STOP_FILE = "stop"
SAVE_MARGIN = 1.5
"""A save may take this many times the longest one measured."""
UNMEASURED_SAVE_SECONDS = 120.0
"""Time kept for a save before one was measured."""


class Stopper:
    """Knows the reasons to stop that this rank can see."""

    def __init__(
        self,
        config: TrainingConfig,
        *,
        save: str | None,
        started: float,
        environ: Mapping[str, str],
        signal: ExitSignal | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.signal = signal
        self._now = now
        self._interval = config.exit_interval
        self._stop_file = Path(save) / STOP_FILE if save else None
        self._saves = save is not None
        self._slowest_save: float | None = None
        minutes = config.exit_duration_in_mins
        self._reserve = minutes == "auto"
        self.end: float | None = None
        """Time at which training must be over, the last save included under `auto`."""
        if minutes == "auto":
            self.end = slurm_end(environ)
        elif minutes is not None:
            self.end = started + 60.0 * minutes

    def seen(self) -> tuple[bool, bool, bool]:
        """Return whether this rank saw the signal, the end of its time, the stop file."""
        received = self.signal is not None and self.signal.received
        late = self.end is not None and self._now() + self.reserved >= self.end
        return received, late, self._stop_file is not None and self._stop_file.exists()

    def reason(self, iteration: int, agreed: tuple[bool, bool, bool]) -> Reason | None:
        """Return why to stop after ``iteration``, given what any rank saw."""
        reasons: tuple[Reason, ...] = ("signal", "duration", "stop file")
        for reason, seen in zip(reasons, agreed, strict=True):
            if seen:
                return reason
        if self._interval is not None and iteration % self._interval == 0:
            return "interval"
        return None

    def obey(self) -> None:
        """Remove the stop file, so that the next run does not stop at once."""
        if self._stop_file is not None:
            self._stop_file.unlink(missing_ok=True)

    def saved(self, seconds: float) -> None:
        """Remember how long a save took."""
        self._slowest_save = max(seconds, self._slowest_save or 0.0)

    @property
    def reserved(self) -> float:
        """Seconds kept for the last save."""
        if not self._reserve or not self._saves:
            return 0.0
        if self._slowest_save is None:
            return UNMEASURED_SAVE_SECONDS
        return SAVE_MARGIN * self._slowest_save

    def warning(self, seconds_to_next_save: float | None, environ: Mapping[str, str]) -> str | None:
        """Return a warning when the job's time ends before anything more is saved, or None."""
        if self.end is not None or seconds_to_next_save is None:
            return None
        end = environ.get("SLURM_JOB_END_TIME", "")
        if not end.isdigit() or self._now() + seconds_to_next_save < int(end):
            return None
        left = max(0.0, int(end) - self._now()) / 60
        return (
            f"WARNING: the job ends in {left:.0f} minutes, the next checkpoint is due in "
            f"{seconds_to_next_save / 60:.0f}: work would be lost. Lower --save-interval or give "
            "--exit-duration-in-mins auto"
        )


def slurm_end(environ: Mapping[str, str]) -> float:
    """Return the time at which Slurm ends this job, in seconds since the epoch.

    Raises:
        UserError: the environment does not say.
    """
    end = environ.get("SLURM_JOB_END_TIME", "")
    if not end.isdigit():
        raise UserError(
            "--exit-duration-in-mins auto reads the job's end from SLURM_JOB_END_TIME, which is "
            "not set here; give minutes instead"
        )
    return float(end)


def clear_stop_file(save: str | None) -> bool:
    """Remove a stop file left from before this run; return whether there was one."""
    path = Path(save) / STOP_FILE if save else None
    if path is None or not os.path.exists(path):
        return False
    path.unlink()
    return True
