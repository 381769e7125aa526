"""An error that all processes have alike, before they are connected, is printed once.

Wrong flags are found by every process on its own, and each would print the same message. One prints
it, and stays for a moment where the others look for it, to tell them what it has printed; one whose
own message is another, or that finds nobody there, prints too. It is

    rank 0, at the place where the run would have met, or
    under torchrun the first process of each machine, so that the message appears once a machine:
    torchrun's own store stands at the meeting point
"""

import hashlib
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

from megatron.core.utils import UserError
from megatron.training.processes import launch

WAIT = 3.0
"""Seconds that processes may differ in finding the error."""
_SIZE = 32


def print_once(text: str, environ: Mapping[str, str] = os.environ) -> None:
    """Print an error on stderr, unless the process that speaks for this one has printed it."""
    digest = hashlib.sha256(text.encode()).digest()
    place = _place(environ)
    if place is not None and place.number > 0 and _ask(place) == digest:
        return
    sys.stderr.write(text)
    sys.stderr.flush()
    if place is not None and place.number == 0:
        _tell(place, digest)


@dataclass(frozen=True)
class _Place:
    """Where processes tell each other what was printed."""

    number: int
    """Of this process; 0 speaks for the others."""
    count: int
    address: tuple[str, int] | str
    """Host and port; or the name of a socket of this machine, which is no file."""


def _place(environ: Mapping[str, str]) -> _Place | None:
    """Return where this process asks or tells; None if it is alone, or its place is the error."""
    try:
        found = launch.discover(environ)
    except UserError:
        return None
    if "TORCHELASTIC_RUN_ID" not in environ:
        if found.world_size == 1:
            return None
        return _Place(found.rank, found.world_size, (found.master_addr, found.master_port))
    if found.local_world_size is None or found.local_world_size == 1:
        return None
    names = ("TORCHELASTIC_RUN_ID", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    words = [str(os.getuid()), *(environ.get(name, "") for name in names)]
    run = hashlib.sha256("\n".join(words).encode()).hexdigest()[:_SIZE]
    return _Place(found.local_rank, found.local_world_size, f"\0megatron-{run}")


def _tell(place: _Place, digest: bytes) -> None:
    """Give ``digest`` to the other processes as they come, for a moment."""
    end = time.monotonic() + WAIT
    try:
        listener = _listen(place)
    except OSError:
        return  # they print it themselves
    with listener:
        for _ in range(place.count - 1):
            listener.settimeout(max(0.01, end - time.monotonic()))
            try:
                with listener.accept()[0] as connection:
                    connection.sendall(digest)
            except OSError:
                if time.monotonic() >= end:
                    return


def _listen(place: _Place) -> socket.socket:
    if not isinstance(place.address, str):
        return socket.create_server(("", place.address[1]), backlog=place.count)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(place.address)
        listener.listen(place.count)
    except OSError:
        listener.close()
        raise
    return listener


def _ask(place: _Place) -> bytes:
    """Return what the first process has printed, in digest; nothing if it does not say."""
    end = time.monotonic() + WAIT
    while (left := end - time.monotonic()) > 0:
        try:
            with _connect(place, left) as connection:
                return connection.recv(_SIZE, socket.MSG_WAITALL)
        except OSError:
            pass
        time.sleep(0.05)
    return b""


def _connect(place: _Place, seconds: float) -> socket.socket:
    if not isinstance(place.address, str):
        return socket.create_connection(place.address, timeout=seconds)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(seconds)
        connection.connect(place.address)
    except OSError:
        connection.close()
        raise
    return connection
