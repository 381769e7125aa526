"""How the processes of a run meet: what can go wrong then, said in one message, in time.

Once connected, all must have been given the same flags, or they would train different models, or
wait for each other for ever. What may differ from process to process: how many readers there are,
and where files and folders are, though not whether they are given. What is in them is compared
later, by `megatron.training.agreement`.
"""

import hashlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron.core import comm
from megatron.core.config import Config, flag_of
from megatron.core.mesh import Axis
from megatron.core.utils import UserError
from megatron.training.failing import failure
from megatron.training.failing.failure import RunFailed
from megatron.training.processes.launch import Launch

OWN = frozenset({"num_workers"})
"""Settings that each process may have its own value of, beside places of files."""
FROM_FIRST = frozenset({"load", "pretrained_checkpoint"})
"""Places of which all ranks use that of rank 0."""
SILENCE = 1.0
"""Seconds that rank 0 has to print what is wrong, before a launcher sees that others have ended."""
RESOLVING = 5.0
"""Seconds in which a name server that does not answer is asked again."""
PATIENCE = timedelta(seconds=10)
"""What torch's own limit may be exceeded by: it does not cover a stranger that never answers."""


def meet(
    launch: Launch,
    connect: Callable[[], None],
    limit: timedelta,
    margin: timedelta = timedelta(0),
) -> None:
    """Call ``connect``, which joins the world, and say what is wrong if that fails.

    A process that is not through some time after ``limit`` and ``margin`` ends with exit code 1.

    Args:
        launch: this process's place.
        connect: joins the world, for as long as limit and margin at most.
        limit: as the user gave it.
        margin: what is waited beyond it.

    Raises:
        UserError: the meeting point cannot be used, or has a name that nobody knows.
        RunFailed: not all processes came.
    """
    place = f"{launch.master_addr}:{launch.master_port}"
    here = f"rank {launch.rank} of {launch.world_size} ({launch.source})"
    waited, minutes = limit + margin, limit / timedelta(minutes=1)
    more = f" and {margin.total_seconds():.0f} s" if margin else ""
    late = (
        f"{here} did not meet the others at {place} ({launch.rendezvous}) within "
        f"{waited.total_seconds():.0f} s (--distributed-timeout-minutes {minutes:g}{more}): were "
        f"all {launch.world_size} started, with ranks from 0 and one WORLD_SIZE, MASTER_ADDR and "
        "MASTER_PORT? Is the port free of other programs? An error that another rank has printed "
        "comes first"
    )

    def give_up() -> None:
        print(f"error: {late}", file=sys.stderr, flush=True)
        failure.leave(1)

    _check_name(launch, here)
    timer = threading.Timer((waited + PATIENCE).total_seconds(), give_up)
    timer.daemon = True
    timer.start()
    try:
        connect()
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise RunFailed(f"{late} ({_first_line(error)})") from None
        raise UserError(
            f"{here} cannot listen at {place}: the port is taken, by another program or by another "
            "process that is rank 0; set MASTER_PORT to a free one on all processes"
        ) from None
    except (dist.DistStoreError, dist.DistBackendError) as error:
        raise RunFailed(f"{late} ({_first_line(error)})") from None
    finally:
        timer.cancel()


def _check_name(launch: Launch, here: str) -> None:
    """Refuse a host of rank 0 that has no address; torch would ask for it until the time limit."""
    deadline = time.monotonic() + RESOLVING
    while True:
        try:
            socket.getaddrinfo(launch.master_addr, launch.master_port, type=socket.SOCK_STREAM)
            return
        except (OSError, UnicodeError) as error:
            is_passing = isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN
            if not is_passing or time.monotonic() > deadline:
                raise UserError(
                    f"{here} cannot find the host of rank 0, {launch.master_addr!r} "
                    f"({launch.rendezvous}): {error}; set MASTER_ADDR to a name or address that "
                    "every machine knows"
                ) from None
        time.sleep(0.5)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]


def check_settings(config: Config) -> None:
    """Refuse to go on if the processes were given different settings; a collective of the world.

    Raises:
        UserError: on rank 0, with the first setting that differs, where, and its values.
        SystemExit: on the others, with the same exit code.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    world = Axis("world", tuple(range(size)), rank, dist.group.WORLD)
    mine = common_settings(config)
    digest = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).digest()
    digests = comm.gather_objects(digest, world)
    if len(set(digests)) == 1:
        return
    values = {name: repr(value) for name, value in config.flatten().items() if name in mine}
    everyone = comm.gather_objects((mine, values), world)
    if rank:
        time.sleep(SILENCE)
        sys.exit(2)
    for other, (settings, given) in enumerate(everyone):
        for name, value in settings.items():
            if value != mine[name]:
                raise UserError(
                    f"the processes were started with different flags: rank {other} has "
                    f"{flag_of(type(config), name)} {given[name]}, rank 0 {values[name]}; start "
                    "all of them with the same"
                )
    raise AssertionError("settings differ, but none of them does")


def common_settings(config: Config) -> dict[str, Any]:
    """Return the settings that all processes must share, by name, as texts.

    Of a place only that it is given, but for those of rank 0 that all use.
    """
    return {
        name: repr(_whole(value) if name in FROM_FIRST else _without_places(value))
        for name, value in config.flatten().items()
        if name not in OWN
    }


def _whole(value: str | None) -> str | None:
    return None if value is None else os.path.abspath(value)


def _without_places(value: object) -> object:
    """Return a value with a mark for each path in it: of a blend, the weights are left."""
    if isinstance(value, tuple | list):
        return [_without_places(one) for one in value]
    return "(a place)" if isinstance(value, str) and "/" in value else value
