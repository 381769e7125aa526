"""Which machine a process runs on, and which folder on which machine a path names.

Names of hosts do not tell machines apart: containers, and machines that were set up alike, have
equal ones. Linux draws a number at every start, which no other machine has.
"""

import functools
import os
import socket
from pathlib import Path
from typing import NamedTuple


class Place(NamedTuple):
    """A folder on a machine; equal ones are the same folder."""

    machine: str
    device: int
    """Of the file system: a path may lead elsewhere in each container."""
    path: str


def place(folder: Path) -> Place:
    """Return where a folder is, or will be once it is made.

    Raises:
        OSError: the file system failed.
    """
    path = Path(os.path.realpath(folder))
    above = next(one for one in (path, *path.parents) if one.exists())
    return Place(started(), os.stat(above).st_dev, str(path))


@functools.cache
def started() -> str:
    """Return what tells this machine, since its last start, from others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # another system than Linux
        return socket.gethostname()


@functools.cache
def processes() -> str:
    """Return what tells the processes that this one sees by their numbers from others.

    A container has numbers of its own on the machine that it shares.
    """
    try:
        return f"{started()}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:  # another system than Linux
        return started()
