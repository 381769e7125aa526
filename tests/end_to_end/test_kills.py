"""Runs that save after every iteration and are killed again and again, at any moment of a save.

After each kill the newest complete checkpoint is whole and no older than what was reported to be
saved; in the end every iteration, however often it was done, has the numbers of a run that nobody
interrupted.
"""

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing import catalog
from megatron.core.dist_checkpointing.reader import Checkpoint
from tests.end_to_end.killed_program import PLACES
from tests.programs import ByHand, assert_rows_equal, by_hand, metrics

RUN = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1 "
    "--max-position-embeddings 16 --global-batch-size 4 --lr 1e-2 --lr-decay-style constant "
    "--mock-data --log-interval 1 "
    "--tokenizer-type NullTokenizer --vocab-size 60 --eval-iters 0 --device cpu --num-workers 0 "
    "--fp64 --metrics-file metrics.jsonl"
)
SAVING = "--save save --load save --save-interval 1 --save-keep-last 2"
LIMIT = 300.0
"""Seconds for a step of a test, on a machine that does much else."""


@pytest.fixture(autouse=True, scope="module")
def _import_once() -> None:
    """Let processes be forked from one that has imported torch, unless there is one already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.end_to_end.killed_program"])


def start(folder: Path, world: int, words: str, *planted: object) -> ByHand:
    """Start the program, which dies where ``planted`` says: rank, place and iteration."""
    planted = planted or (0, "nowhere", 0)
    given = [*planted, *RUN.split(), *words.split()]
    return by_hand("tests.end_to_end.killed_program", given, folder=folder, world=world)


def tracked(save: Path) -> int:
    """Return what the tracker names, 0 without one."""
    found = catalog.read_tracker(save)
    assert found != catalog.RELEASE
    return found or 0


def check(save: Path, acknowledged: int) -> None:
    """Look at what a kill has left behind."""
    found = catalog.newest(catalog.scan(save))
    assert found is not None and isinstance(found.name, int) and found.name >= acknowledged
    with Checkpoint(found.folder) as checkpoint:
        assert checkpoint.damages() == []
        assert checkpoint.facts["iteration"] == found.name
    assert tracked(save) <= found.name <= tracked(save) + 1  # stopped between rename and tracker


def kill_one(run: ByHand, save: Path, before: int, draw: random.Random) -> None:
    """Kill one process of a run, or all, some time after it has saved something."""
    end = time.monotonic() + LIMIT
    while tracked(save) == before:
        assert time.monotonic() < end and run.processes[0].is_alive(), run.errors.read_text()
        time.sleep(0.001)
    time.sleep(draw.uniform(0, 0.2))
    victims = draw.choice([run.processes, [draw.choice(run.processes)]])
    for process in victims:
        if process.pid is not None:
            os.kill(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("world", "kills"),
    [
        (1, 5),
        (2, 3),
        pytest.param(1, 60, marks=pytest.mark.slow),
        pytest.param(2, 60, marks=pytest.mark.slow),
    ],
)
def test_ckpt_20_kills_at_any_moment_lose_nothing_and_change_nothing(
    tmp_path: Path, world: int, kills: int
) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    straight.mkdir()
    killed.mkdir()
    draw, save, places = random.Random(kills + world), killed / "save", list(PLACES)
    draw.shuffle(places)
    acknowledged = 0
    # Without an end: the next run but the last is always long enough.
    for number in range(kills):
        before = tracked(save)
        at_random = number % 5 == 4 or (kills > 5 and number % 2)
        if at_random:
            run = start(killed, world, f"{SAVING} --train-iters 100000")
            kill_one(run, save, before, draw)
        else:
            place = places[number % len(places)]
            rank = draw.randrange(world) if place in ("written", "marked") else 0
            first = max(before + draw.randint(1, 2), 3)
            run = start(killed, world, f"{SAVING} --train-iters 100000", rank, place, first)
        codes = run.codes(LIMIT)
        assert None not in codes, run.errors.read_text()
        assert -signal.SIGKILL in codes, run.errors.read_text()
        check(save, acknowledged)
        acknowledged = tracked(save)
    total = acknowledged + 2
    assert start(killed, world, f"{SAVING} --train-iters {total}").codes(LIMIT) == [0] * world
    kept = sorted(path.name for path in save.iterdir() if path.is_dir())
    assert kept == [catalog.folder_name(total - 1), catalog.folder_name(total)]
    assert start(straight, 1, f"--train-iters {total}").codes(LIMIT) == [0]
    expected = {row["iteration"]: row for row in metrics(straight / "metrics.jsonl")}
    rows = metrics(killed / "metrics.jsonl")
    assert {row["iteration"] for row in rows} == set(range(1, total + 1))
    assert_rows_equal(rows, [expected[row["iteration"]] for row in rows])
