"""A meeting in a store that outlives the processes which meet there.

torchrun's agent keeps one store for all attempts of a job, with all that processes of earlier ones
have written: a process that starts again could read the address of a dead one, and fail to connect.
So those of one attempt agree on a room of their own first, a prefix that nobody else knows:

    rank r > 0   writes a fresh word under its rank, and waits for the answer to that very word
    rank 0       chooses the room and answers each word with it, until every rank has thanked

Only a process that lives can answer a word that was not there before. The number of restarts would
not do instead: each agent counts its own, and one that joins a running job begins at 0.
"""

import time
import uuid
from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import (  # type: ignore[attr-defined]
    DistStoreError,
    PrefixStore,
    Store,
    TCPStore,
)

from megatron.training.processes.launch import Launch

PAUSE = 0.01
"""Seconds between two looks of rank 0."""


def is_kept(environ: Mapping[str, str]) -> bool:
    """Return whether this process meets others in a store that torchrun's agent keeps."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def meet(launch: Launch, limit: timedelta) -> Store:
    """Return a part of the agent's store for the processes of this attempt; called by all of them.

    Raises:
        DistNetworkError: the store cannot be reached.
        DistStoreError: some process did not come within ``limit``.
    """
    kept = TCPStore(launch.master_addr, launch.master_port, timeout=limit)
    return room(kept, launch.rank, launch.world_size, limit)


def room(store: Store, rank: int, world_size: int, limit: timedelta) -> Store:
    """Return the part of a store that only the processes of this attempt use.

    Called by all of them.

    Raises:
        DistStoreError: some process did not come within ``limit``.
    """
    store = PrefixStore("meeting", store)
    if rank:
        word = uuid.uuid4().hex
        store.set(f"word/{rank}", word)
        store.wait([f"answer/{word}"], limit)
        name = store.get(f"answer/{word}").decode()
        store.set(f"thanks/{name}/{rank}", "")
    else:
        name, end = uuid.uuid4().hex, time.monotonic() + limit.total_seconds()
        for other in range(1, world_size):
            _lead_in(store, name, other, end)
    return PrefixStore(name, store)


def _lead_in(store: Store, name: str, rank: int, end: float) -> None:
    """Answer a rank's words until it has thanked: the first may be one of a dead process."""
    answered = None
    while not store.check([f"thanks/{name}/{rank}"]):
        if time.monotonic() > end:
            raise DistStoreError(f"rank {rank} did not come")
        if store.check([f"word/{rank}"]) and (word := store.get(f"word/{rank}")) != answered:
            store.set(f"answer/{word.decode()}", name)
            answered = word
        else:
            time.sleep(PAUSE)
