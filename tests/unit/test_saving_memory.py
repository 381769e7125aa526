"""Saves, at once and beside training, take the memory that they say, and the same each time.

What the code itself takes is counted to the byte. Resident memory is that of a process of its own:
in one that has run other tests it depends on what they left to the allocator.
"""

import multiprocessing
import threading
import weakref
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from megatron.core.dist_checkpointing import part, save
from megatron.core.dist_checkpointing.background import BackgroundSave
from megatron.core.dist_checkpointing.plan import Item
from megatron.core.dist_checkpointing.staging import HostBuffer
from tests.unit.checkpoint_files import WORLD, item

SAVES = 20
MIB = 2**20


def half_strided(size: int) -> list[Item]:
    """Return a state of ``size`` bytes, half of which must be copied to be written."""
    rows = size // 24
    state = torch.ones(rows, 6, dtype=torch.int32)  # a page that was never written takes no memory
    return [item("plain", state[: rows // 2]), item("strided", state[:, ::2])]


def put(way: str, items: list[Item], final: Path, buffer: HostBuffer) -> None:
    if way == "beside":
        BackgroundSave(items, final, {}, WORLD, buffer).finish()
    else:
        save.save(items, final, {}, WORLD)


def _saves_alone(way: str, size: int, folder: Path, told: Connection) -> None:
    part.CHUNK = MIB
    items, buffer, process = half_strided(size), HostBuffer(), psutil.Process()
    resident = [process.memory_info().rss]
    for number in range(SAVES):
        put(way, items, folder / f"iter_{number % 2}", buffer)
        resident.append(process.memory_info().rss)
    told.send((resident, buffer.bytes))


@pytest.mark.parametrize(
    ("way", "megabytes"),
    [
        ("at once", 48),
        ("beside", 48),
        pytest.param("at once", 200, marks=pytest.mark.slow),
        pytest.param("beside", 200, marks=pytest.mark.slow),
    ],
)
def test_ckpt_22_twenty_saves_keep_resident_memory(
    tmp_path: Path, way: str, megabytes: int
) -> None:
    """After save 20 within 15% of what it was after save 3, and bounded by what saves may take."""
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe(duplex=False)
    size = megabytes * MIB
    child = context.Process(target=_saves_alone, args=(way, size, tmp_path, there))
    child.start()
    there.close()  # so that a child that dies is an end of file
    resident, held = here.recv()
    child.join()
    assert child.exitcode == 0
    assert resident[SAVES] < 1.15 * resident[3]
    copies = size if way == "beside" else 0
    assert copies - 1024 <= held <= copies
    # Far less than the half that is not contiguous, which is copied chunk by chunk.
    taken = copies + part.WRITERS * MIB
    assert max(resident) - resident[0] < taken + size // 4


@pytest.mark.parametrize("way", ["at once", "beside"])
def test_ckpt_22_copies_on_the_way_are_one_chunk_for_each_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A limit of no bytes leaves everything to be written as it lies, beside training too."""
    monkeypatch.setattr(part, "CHUNK", MIB // 4)
    alive, most, lock, empty = dict[int, int](), list[int](), threading.Lock(), torch.empty

    def counted(*words: Any, **more: Any) -> torch.Tensor:
        made = empty(*words, **more)
        storage = made.untyped_storage()
        with lock:
            alive[id(storage)] = storage.nbytes()
            most.append(sum(alive.values()))
        weakref.finalize(storage, alive.pop, id(storage))
        return made

    items, buffer = half_strided(6 * MIB), HostBuffer(0)
    monkeypatch.setattr(torch, "empty", counted)
    for number in range(3):
        put(way, items, tmp_path / f"iter_{number}", buffer)
        assert sum(alive.values()) == 0
    assert 0 < max(most) <= part.WRITERS * part.CHUNK
