"""Runs that save after every iteration and are killed again and again, at any moment of a save.

After each kill the newest complete checkpoint is whole and no older than what was reported to be
saved; in the end every iteration, however often it was done, has the numbers of a run that nobody
interrupted, bit for bit.
"""

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing import catalog, writer
from megatron.core.dist_checkpointing.publishing import PARTIAL
from megatron.core.dist_checkpointing.reader import Checkpoint
from tests.end_to_end.interruptions import CONSTANT, LIMIT, import_once, start, straight
from tests.end_to_end.killed_program import COPIED, LOCAL_PLACES, PLACES
from tests.programs import ByHand, metrics

REGULAR = "--save save --load save --save-interval 1 --save-keep-last 2"
RECOVERY = "--save save --load save --save-interval 4 --non-persistent-save-interval 1"
LOCAL = (
    f"{RECOVERY} --non-persistent-ckpt-type local --non-persistent-local-ckpt-dir disks/{{rank}}"
)
WAYS = {
    "at once": (REGULAR, PLACES),
    "beside": (f"{REGULAR} --async-save", (*PLACES, COPIED)),
    "global": (f"{RECOVERY} --async-save", PLACES),
    "local": (LOCAL, LOCAL_PLACES[:-1]),
    "with copies": (f"{LOCAL} --replication --replication-jump 1", LOCAL_PLACES),
}
"""Flags, and the places of a save where a rank may die."""
OF_ANY_RANK = {"written", "marked", COPIED, *LOCAL_PLACES}


@pytest.fixture(autouse=True, scope="module")
def _import_once() -> None:
    import_once("tests.end_to_end.killed_program")


def reported(folder: Path) -> int:
    """Return the last iteration that was said to be saved, 0 for none."""
    printed = folder / "out.0"
    text = printed.read_text() if printed.exists() else ""
    found = re.findall(r"successfully saved (?:local )?checkpoint from iteration +(\d+) to", text)
    return max(map(int, found), default=0)


def begun(folder: Path) -> list[int]:
    """Return the iterations that runs have gone on from."""
    printed = (folder / "out.0").read_text()
    return [int(number) for number in re.findall(r"training from iteration (\d+)", printed)]


def check(save: Path, way: str) -> None:
    """Look at what a kill has left in the shared folders: what is complete is whole."""
    for root in (save, save / "non_persistent"):
        for found in catalog.scan(root).complete:
            with Checkpoint(found.folder) as checkpoint:
                assert checkpoint.damages() == []
                assert checkpoint.facts["iteration"] == found.name
    if way in ("at once", "beside"):
        newest = catalog.newest(catalog.scan(save))
        assert newest is not None and isinstance(newest.name, int)
        assert newest.name >= reported(save.parent)
        tracked = catalog.read_tracker(save)
        assert isinstance(tracked, int) or tracked is None
        # Stopped between rename and tracker.
        assert (tracked or 0) <= newest.name <= (tracked or 0) + 1


def kill_one(run: ByHand, folder: Path, before: int, draw: random.Random) -> None:
    """Kill one process of a run, or all, some time after it has saved something."""
    end = time.monotonic() + LIMIT
    while reported(folder) <= before:  # a run may have gone on from what nobody had reported
        assert time.monotonic() < end and run.processes[0].is_alive(), run.errors.read_text()
        time.sleep(0.001)
    time.sleep(draw.uniform(0, 0.2))
    victims = draw.choice([run.processes, [draw.choice(run.processes)]])
    for process in victims:
        if process.pid is not None:
            os.kill(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("way", "world", "kills"),
    [
        ("at once", 1, 5),
        ("beside", 2, 5),
        ("global", 1, 2),
        ("with copies", 2, 5),
        pytest.param("at once", 2, 5, marks=pytest.mark.slow),
        pytest.param("beside", 1, 6, marks=pytest.mark.slow),
        pytest.param("local", 1, 5, marks=pytest.mark.slow),
        pytest.param("at once", 1, 60, marks=pytest.mark.slow),
        pytest.param("at once", 2, 60, marks=pytest.mark.slow),
        pytest.param("beside", 2, 60, marks=pytest.mark.slow),
        pytest.param("global", 2, 30, marks=pytest.mark.slow),
        pytest.param("with copies", 2, 30, marks=pytest.mark.slow),
    ],
)
def test_ckpt_20_kills_at_any_moment_lose_nothing_and_change_nothing(
    tmp_path: Path, way: str, world: int, kills: int
) -> None:
    words, places = WAYS[way][0], list(WAYS[way][1])
    killed, draw = tmp_path / "killed", random.Random(kills + world)
    killed.mkdir()
    draw.shuffle(places)
    acknowledged = [0]
    # Without an end: the next run but the last is always long enough.
    for number in range(kills):
        before = acknowledged[-1]
        if number >= len(places) and number % 2 == 0:
            run = start(killed, world, f"{words} --train-iters 100000")
            kill_one(run, killed, before, draw)
        else:
            place = places[number % len(places)]
            rank = draw.randrange(world) if place in OF_ANY_RANK else 0
            first = max(before + draw.randint(1, 2), 3)
            run = start(killed, world, f"{words} --train-iters 100000", rank, place, first)
        codes = run.codes(LIMIT)
        assert None not in codes, run.errors.read_text()
        assert -signal.SIGKILL in codes, run.errors.read_text()
        check(killed / "save", way)
        acknowledged.append(max(reported(killed), begun(killed)[-1]))
    # A checkpoint may be complete before anybody has said so: what was done last need not be lost.
    total = max(row["iteration"] for row in metrics(killed / "metrics.jsonl")) + 2
    ended = start(killed, world, f"{words} --train-iters {total}")
    assert ended.codes(LIMIT) == [0] * world, ended.errors.read_text()
    assert all(
        found >= at_least for found, at_least in zip(begun(killed), acknowledged, strict=True)
    )
    # A folder whose writer was killed before he signed may be somebody's for ten minutes.
    folders = sorted((killed / "save").glob("iter_*"))
    kept = [
        path.name for path in folders if path.suffix != PARTIAL or (path / writer.RECORD).exists()
    ]
    assert kept[-1] == catalog.folder_name(total)
    if way in ("at once", "beside"):
        assert kept == [catalog.folder_name(total - 1), catalog.folder_name(total)]
    expected = straight(tmp_path / "straight", f"{CONSTANT} --train-iters {total}", world)
    rows = metrics(killed / "metrics.jsonl")
    assert {row["iteration"] for row in rows} == set(range(1, total + 1))
    for row in rows:
        assert [row] == expected[row["iteration"]]
