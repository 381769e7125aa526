"""An error that all processes of a run have alike, before they are connected, is printed once.

Wrong flags are found by every process on its own, and each would print the same message. Rank 0
prints it, and stays for a moment at the place where the run would have met, to tell the others
what it has printed; one whose own message is another, or that finds nobody there, prints too.
"""

import hashlib
import os
import socket
import sys
import time
from collections.abc import Mapping

from megatron.core.utils import UserError
from megatron.training import launch
from megatron.training.launch import Launch

WAIT = 3.0
"""Seconds that processes may differ in finding the error."""
_SIZE = 32


def print_once(text: str, environ: Mapping[str, str] = os.environ) -> None:
    """Print an error on stderr, unless rank 0 has printed the same."""
    digest = hashlib.sha256(text.encode()).digest()
    try:
        place = launch.discover(environ)
    except UserError:  # which is the error
        place = None
    if place is not None and place.rank > 0:
        if _ask(place, "TORCHELASTIC_RUN_ID" in environ) == digest:
            return
    sys.stderr.write(text)
    sys.stderr.flush()
    if place is not None and place.rank == 0 and place.world_size > 1:
        _tell(place, digest)


def _tell(place: Launch, digest: bytes) -> None:
    """Give ``digest`` to the other ranks as they come, for a moment."""
    end = time.monotonic() + WAIT
    try:
        listener = socket.create_server(("", place.master_port), backlog=place.world_size)
    except OSError:
        return  # torchrun is there, and ends the others as soon as this process has ended
    with listener:
        for _ in range(place.world_size - 1):
            listener.settimeout(max(0.01, end - time.monotonic()))
            try:
                with listener.accept()[0] as connection:
                    connection.sendall(digest)
            except OSError:
                if time.monotonic() >= end:
                    return


def _ask(place: Launch, under_torchrun: bool) -> bytes:
    """Return what rank 0 has printed, in digest; nothing if it does not say."""
    end = time.monotonic() + WAIT
    while (left := end - time.monotonic()) > 0:
        if not under_torchrun:  # whose store would answer in its own language
            try:
                address = (place.master_addr, place.master_port)
                with socket.create_connection(address, timeout=left) as connection:
                    return connection.recv(_SIZE, socket.MSG_WAITALL)
            except OSError:
                pass
        time.sleep(0.05)
    return b""
