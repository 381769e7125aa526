"""What a failed process says, and how it ends.

An error is told in one of two ways. What a user can fix, and a run that has gone wrong, are one
message; all ranks raise it alike, and one of them prints it. Anything else is a traceback.
"""

import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from megatron.core.utils import PeerError, UserError

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
INTERRUPTED = 128 + signal.SIGINT
FLUSHING = 1.0
"""Seconds that a process which leaves takes to write out what was printed."""


class RunFailed(RuntimeError):
    """Training cannot go on: the message says why, and the process ends with this code."""

    code = 1


class SaveFailed(RunFailed):
    """A checkpoint could not be written, and the run was to end for that."""


@dataclass(frozen=True)
class Failure:
    """An error that ends a process."""

    message: str
    """One line or a few."""
    stack: str
    """The traceback."""
    code: int
    """The process's exit code."""
    is_plain: bool
    """The message says it all."""
    is_lost: bool = False
    """Another rank did not answer, so that its error may be the cause of this one."""
    is_late: bool = False
    """It did not answer in time."""

    @property
    def line(self) -> str:
        """Return a plain error as it is printed after the program's name."""
        return self.message if self.code == INTERRUPTED else f"error: {self.message}"

    def to_json(self) -> dict[str, Any]:
        """Return it as it travels between processes."""
        return dict(self.__dict__)


def describe(error: BaseException) -> Failure:
    """Return what there is to say of an error that is being handled."""
    stack = "".join(traceback.format_exception(error))
    if isinstance(error, UserError):
        return Failure(str(error), "", 2, True)  # torchrun prints the stack that it is given
    if isinstance(error, RunFailed):
        return Failure(str(error), stack, error.code, True)
    if isinstance(error, KeyboardInterrupt):
        return Failure("interrupted", stack, INTERRUPTED, True)
    if isinstance(error, SystemExit):  # of a program's own code; a text is an error, as to Python
        code = error.code if isinstance(error.code, int) else 1
        return Failure(f"SystemExit: {error.code}", stack, code, False)
    message = f"{type(error).__name__}: {error}"
    lost = isinstance(error, PeerError) or (
        isinstance(error, RuntimeError) and _in_communication(error.__traceback__)
    )
    late = lost and re.search(r"time[d ]*-?out", str(error), re.IGNORECASE) is not None
    return Failure(message, stack, 1, False, lost, late)


def _in_communication(found: TracebackType | None) -> bool:
    return any(is_communication(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(found))


def is_communication(file: str) -> bool:
    """Return whether code of a source file waits for other ranks."""
    path = file.replace(os.sep, "/")
    return path.endswith("megatron/core/comm.py") or "/torch/distributed/" in path


def write_error_file(
    message: str, stack: str, when: float | None = None, environ: Mapping[str, str] = os.environ
) -> None:
    """Leave an error where torchrun looks for it, if it asks for that.

    Args:
        message: of the error.
        stack: its traceback.
        when: seconds since the epoch; torchrun shows the earliest error of all ranks.
        environ: says where.
    """
    path = environ.get(ERROR_FILE)
    if not path:
        return
    timestamp = str(int(time.time() if when is None else when))
    extra = {"py_callstack": stack, "timestamp": timestamp}
    content = {"message": {"message": message, "extraInfo": extra}}
    Path(path).write_text(json.dumps(content), encoding="utf-8")


def end_children() -> None:
    """Kill the processes that this one has started through multiprocessing, such as readers.

    Readers that leave the exit signal to the loop ignore what Python ends its children with: after
    a failure it would wait for them for ever. That they are killed here is no failure, as which
    torch's handler would report it.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in multiprocessing.active_children():
        child.kill()


def leave(code: int) -> NoReturn:
    """End the process from any thread, without waiting for collectives that will never end."""
    try:
        end_children()
        # In a thread, since the main thread may hold the lock of a stream that nobody reads.
        flushing = threading.Thread(target=_flush, daemon=True)
        flushing.start()
        flushing.join(FLUSHING)
    finally:  # whatever happens: somebody waits for the end of this process
        os._exit(code)


def _flush() -> None:
    for stream in (sys.stderr, sys.stdout):
        try:
            stream.flush()
        except (OSError, ValueError):  # nobody reads it any more, or it is closed
            pass
