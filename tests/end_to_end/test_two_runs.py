"""A second run that is given the --save of one that lives, and one that follows a killed one."""

import json
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing import catalog, writer
from tests.programs import ByHand, assert_rows_equal, by_hand, metrics

RUN = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1 "
    "--max-position-embeddings 16 --global-batch-size 4 --lr 1e-2 --lr-decay-style constant "
    "--mock-data --log-interval 1 --tokenizer-type NullTokenizer --vocab-size 60 --eval-iters 0 "
    "--device cpu --num-workers 0 --fp64 --save save --load save --save-interval 1 "
    "--save-keep-last 2"
)
LIMIT = 300.0


@pytest.fixture(autouse=True, scope="module")
def _import_once() -> None:
    """Let processes be forked from one that has imported torch, unless there is one already."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["pretrain_gpt"])


def start(folder: Path, iterations: int, name: str) -> ByHand:
    words = f"{RUN} --train-iters {iterations} --metrics-file {name}.jsonl"
    return by_hand("pretrain_gpt", words.split(), folder=folder, world=1)


def test_a_second_run_is_refused_and_follows_when_the_first_is_killed(tmp_path: Path) -> None:
    first = start(tmp_path, 100_000, "first")
    save, end = tmp_path / "save", time.monotonic() + LIMIT
    while catalog.read_tracker(save) is None:
        assert time.monotonic() < end and first.processes[0].is_alive(), first.errors.read_text()
        time.sleep(0.01)
    assert start(tmp_path, 100_000, "second").codes(LIMIT) == [2]
    said = first.errors.read_text()
    assert f"--save (save): another run saves there: process {first.processes[0].pid} on" in said
    assert not (tmp_path / "second.jsonl").exists()
    # The first one has noticed nothing, and its status is its own.
    assert first.processes[0].is_alive()
    assert json.loads((save / "run_status.json").read_text())["reason"] == "running"
    before = catalog.read_tracker(save)
    while catalog.read_tracker(save) == before:
        assert time.monotonic() < end
        time.sleep(0.01)
    first.processes[0].kill()
    first.codes(LIMIT)
    assert (save / writer.RECORD).exists()  # nobody has tidied up
    done = catalog.read_tracker(save)
    assert isinstance(done, int)
    third = start(tmp_path, done + 3, "third")
    assert third.codes(LIMIT) == [0], third.errors.read_text()
    assert catalog.read_tracker(save) == done + 3
    assert not (save / writer.RECORD).exists()
    assert not catalog.scan(save).unfinished
    straight = tmp_path / "straight"
    os.mkdir(straight)
    assert start(straight, done + 3, "all").codes(LIMIT) == [0]
    assert_rows_equal(metrics(tmp_path / "third.jsonl")[-3:], metrics(straight / "all.jsonl")[-3:])
