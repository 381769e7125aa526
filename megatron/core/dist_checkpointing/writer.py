"""Who writes into a folder, said in a file there, so that others can tell if that one lives.

A folder of checkpoints may be on a file system that many machines share, and a writer may be killed
at any moment. So a record names the process (machine, number, time of start) and the job. On the
same machine the system knows whether the process runs. Of another machine only the file system is
seen: a writer that lives touches its files. All ages are by the clock of the file system, as clocks
of machines differ. A job that is started anew (by torchrun, or by Slurm after a requeue) has the
name of the one before, whose processes its launcher has ended; but scripts give constant names, so
that another job that runs may have it too.
"""

import errno
import json
import os
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from megatron.core.dist_checkpointing import machine

RECORD = "writer.json"
"""Name of the file that says who writes."""


@dataclass(frozen=True)
class Writer:
    """A process that writes, and the job it belongs to."""

    host: str
    machine: str
    """Tells machines, and containers with process numbers of their own, apart."""
    pid: int
    started: str
    """When the process began, by its machine: numbers of processes are used again."""
    job: str | None
    """What the launcher calls the job; a restart has the same name. None: it has none."""
    since: float
    """When it began to write, in seconds since the epoch."""

    @property
    def text(self) -> str:
        """Return the record as JSON."""
        return json.dumps(asdict(self))

    @property
    def runs(self) -> bool | None:
        """Return whether the process runs; None if it is on a machine that cannot be asked."""
        if self.machine != machine.processes():
            return None
        return _start_of(self.pid) == self.started

    @property
    def is_this_process(self) -> bool:
        """Return whether the process is the one that asks."""
        mine = this_process()
        return (self.machine, self.pid, self.started) == (mine.machine, mine.pid, mine.started)

    @property
    def is_of_this_job(self) -> bool:
        """Return whether it belongs to the job of the process that asks."""
        return self.job is not None and self.job == _job(os.environ)

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since).strftime("%Y-%m-%d %H:%M:%S")
        job = f" ({self.job})" if self.job is not None else ""
        return f"process {self.pid} on {self.host}{job}, which began at {since}"


def this_process() -> Writer:
    """Return the record of the process that asks."""
    return Writer(
        host=socket.gethostname(),
        machine=machine.processes(),
        pid=os.getpid(),
        started=_start_of(os.getpid()) or "",
        job=_job(os.environ),
        since=time.time(),
    )


def parse(text: str) -> Writer | None:
    """Return who a record names; None if it is not whole, as after a stop while it was written."""
    try:
        value = json.loads(text)
        datetime.fromtimestamp(value["since"])  # a time that there is
        return Writer(
            host=str(value["host"]),
            machine=str(value["machine"]),
            pid=int(value["pid"]),
            started=str(value["started"]),
            job=None if value["job"] is None else str(value["job"]),
            since=float(value["since"]),
        )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def sign(folder: Path) -> None:
    """Leave this process's record in a folder that it is about to fill."""
    (folder / RECORD).write_text(this_process().text, encoding="utf-8")


def may_live(folder: Path, patience: float) -> bool:
    """Return whether somebody else may still be filling ``folder``.

    Only of a process that is known to have ended is it known at once that it does not. Of any other
    one, also of one that has not signed yet or whose record nobody can read, the folder tells.

    Args:
        folder: which is, or is about to be, signed.
        patience: seconds without a change after which a writer that cannot be asked is given up.
    """
    found = _signature(folder)
    if found is not None:
        if found.is_this_process:
            return False
        if found.runs is not None:
            return found.runs
    return quiet(folder) < patience


def _signature(folder: Path) -> Writer | None:
    try:
        return parse((folder / RECORD).read_text(encoding="utf-8", errors="replace"))
    except OSError:  # not there (yet), or out of reach: the age of the folder decides
        return None


def quiet(folder: Path) -> float:
    """Return for how many seconds nothing in ``folder`` has changed; 0 if it has just gone."""
    try:
        changed = [folder.stat().st_mtime, *(path.stat().st_mtime for path in folder.iterdir())]
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):
            raise
        return 0.0  # its writer has just renamed it, or a file in it
    return now(folder.parent) - max(changed)


def now(folder: Path) -> float:
    """Return the time by the clock that stamps files in ``folder``."""
    with tempfile.NamedTemporaryFile(prefix=".clock.", dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime


def _start_of(pid: int) -> str | None:
    """Return when a process of this machine began; None if it does not run, or has ended."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        if os.path.exists("/proc/self/stat"):
            return None
        return "" if _answers(pid) else None
    except ProcessLookupError:
        return None
    # The name of the program, in brackets, may hold anything.
    state, *fields = status.rpartition(")")[2].split()
    return None if state in ("Z", "X") else fields[18]


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it runs, for somebody else
        return True
    return True


def _job(environ: Mapping[str, str]) -> str | None:
    run = environ.get("TORCHELASTIC_RUN_ID", "none")
    if run not in ("", "none"):  # torchrun's name for jobs that were given none
        return f"torchrun's job {run}"
    job, step = environ.get("SLURM_JOB_ID"), environ.get("SLURM_STEP_ID")
    return f"Slurm's job {job}.{step}" if job and step else None
