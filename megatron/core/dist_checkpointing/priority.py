"""How much a thread that works in the background may take from the others: Linux alone knows.

Linux keeps niceness and I/O class per thread. Niceness says who gets a processor when more threads
are ready than there are; the I/O class counts with schedulers that look at it (bfq, mq-deadline),
and for what the thread itself sends to the disk. Both are only ever lowered, which needs no rights.
"""

import ctypes
import os
import platform
import sys
import threading

IO_CLASSES = {0: "none", 1: "realtime", 2: "best effort", 3: "idle"}
_SET_IO_PRIORITY = {"x86_64": 251, "aarch64": 30}
"""Number of the system call ``ioprio_set``, by machine."""
_THREAD, _CLASS_SHIFT, _BEST_EFFORT_LEVEL = 1, 13, 4


def settable() -> bool:
    """Return whether threads have priorities of their own here."""
    return sys.platform == "linux" and platform.machine() in _SET_IO_PRIORITY


def lower_thread(niceness: int, io_class: int) -> None:
    """Give the calling thread another niceness and I/O class.

    Raises:
        OSError: the system refuses; less niceness than the process has needs rights.
    """
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, niceness)
    level = _BEST_EFFORT_LEVEL if io_class in (1, 2) else 0
    libc = ctypes.CDLL(None, use_errno=True)
    call = _SET_IO_PRIORITY[platform.machine()]
    if libc.syscall(call, _THREAD, thread, (io_class << _CLASS_SHIFT) | level):
        number = ctypes.get_errno()
        raise OSError(number, f"I/O class {io_class}: {os.strerror(number)}")


def refusal(niceness: int, io_class: int) -> str | None:
    """Say why a thread may not have these priorities; None if it may."""
    problems: list[str] = []

    def try_it() -> None:
        try:
            lower_thread(niceness, io_class)
        except OSError as error:
            problems.append(str(error))

    thread = threading.Thread(target=try_it)
    thread.start()
    thread.join()
    return problems[0] if problems else None
