"""A store that outlives processes: those of each attempt meet by themselves, whatever it holds."""

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron.training.processes import agent_store

LIMIT = timedelta(seconds=60)


def _clients(count: int) -> list[dist.TCPStore]:
    """Return so many connections to a store of their own, whose server is the first."""
    server = dist.TCPStore("localhost", 0, is_master=True, timeout=LIMIT, wait_for_workers=False)
    others = [
        dist.TCPStore("localhost", server.port, timeout=LIMIT, wait_for_workers=False)
        for _ in range(count)
    ]
    return [server, *others]


def _meet(stores: list[dist.TCPStore]) -> list[dist.Store]:
    """Be all ranks of an attempt, and return the room that each was led to."""
    found: dict[int, dist.Store] = {}

    def come(rank: int) -> Callable[[], None]:
        def run() -> None:
            found[rank] = agent_store.room(stores[rank], rank, len(stores), LIMIT)

        return run

    threads = [threading.Thread(target=come(rank)) for rank in range(len(stores))]
    for thread in reversed(threads):  # rank 0 comes last
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(len(stores))]


def test_each_attempt_has_a_room_of_its_own() -> None:
    _, *stores = _clients(4)
    for world in (4, 4, 3):  # the last with one process less
        rooms = _meet(stores[:world])
        assert not rooms[0].check(["address"]), "what an attempt before has written"
        rooms[0].set("address", f"of {world}")
        assert {room.get("address") for room in rooms} == {f"of {world}".encode()}


def test_what_dead_processes_have_left_misleads_nobody() -> None:
    """Of an attempt before, ranks 1 and 2 died when they had asked, and rank 0 when it answered."""
    _, *stores = _clients(3)
    left = dist.PrefixStore("meeting", stores[0])
    for rank in (1, 2):
        left.set(f"word/{rank}", f"of a dead rank {rank}")
    left.set("answer/of a dead rank 1", "a room that nobody is in")
    left.set("thanks/a room that nobody is in/1", "")
    rooms = _meet(stores)
    rooms[1].set("key", "value")
    assert rooms[0].get("key") == rooms[2].get("key") == b"value"


def test_a_rank_that_does_not_come_is_named() -> None:
    _, *stores = _clients(2)
    soon = timedelta(seconds=0.2)
    with pytest.raises(dist.DistStoreError, match="rank 1 did not come"):
        agent_store.room(stores[0], 0, 2, soon)
    with pytest.raises(dist.DistStoreError):
        agent_store.room(stores[1], 1, 2, soon)


@pytest.mark.parametrize(("value", "kept"), [("True", True), ("False", False), (None, False)])
def test_torchrun_says_whether_its_agent_keeps_a_store(value: str | None, kept: bool) -> None:
    environ = {} if value is None else {"TORCHELASTIC_USE_AGENT_STORE": value}
    assert agent_store.is_kept(environ) == kept
