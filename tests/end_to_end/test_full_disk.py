"""Runs whose disk takes no checkpoint for a while: nothing older is harmed, nothing is left behind.

A limit on the size of files stands for the full disk; `unit/test_small_disk.py` has a real one.
"""

import json
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing import catalog
from megatron.core.dist_checkpointing.reader import Checkpoint
from tests.end_to_end.interruptions import LIMIT, start

RUN = "--save save --load save --train-iters 6"
REGULAR = f"{RUN} --save-interval 2"
RECOVERY = f"{RUN} --save-interval 100 --non-persistent-save-interval 2"
LOCAL = f"{RECOVERY} --non-persistent-ckpt-type local --non-persistent-local-ckpt-dir ./disk"


def held(root: Path) -> list[int]:
    """Return the iterations of all checkpoints in a folder, which are whole; there is no rest."""
    found = catalog.scan(root)
    assert not found.ignored and not found.unfinished
    for one in found.complete:
        with Checkpoint(one.folder) as checkpoint:
            assert checkpoint.damages() == []
    return [int(one.name) for one in found.complete]


@pytest.mark.parametrize(("world", "words"), [(2, REGULAR), (1, RECOVERY)])
def test_ckpt_21_training_goes_on_after_a_failed_save(
    tmp_path: Path, world: int, words: str
) -> None:
    """Of two ranks it fails on one."""
    run = start(tmp_path, world, words, world - 1, "full", 4)
    assert run.codes(LIMIT) == [0] * world
    printed = (tmp_path / "out.0").read_text()
    assert "WARNING: saving iteration 4 to save" in printed and "File too large" in printed
    if words == REGULAR:
        assert held(tmp_path / "save") == [2, 6]
    else:
        # The last is a regular one; the recovery one of before is not replaced by one that failed.
        assert held(tmp_path / "save") == [6]
        assert held(tmp_path / "save" / "non_persistent") == [2]


@pytest.mark.parametrize(("words", "source"), [(REGULAR, "save/iter_"), (LOCAL, "disk/save-")])
def test_ckpt_21_a_run_that_asks_for_it_ends_and_says_why(
    tmp_path: Path, words: str, source: str
) -> None:
    run = start(tmp_path, 1, f"{words} --exit-on-failed-save", 0, "full", 4)
    assert run.codes(LIMIT) == [1]
    assert "error: iteration 4 was not saved:" in run.errors.read_text()
    status = json.loads((tmp_path / "save" / "run_status.json").read_text())
    assert (status["reason"], status["iteration"]) == ("failure", 4)
    assert source in status["checkpoint"]
    (tmp_path / "out.0").unlink()
    assert start(tmp_path, 1, words).codes(LIMIT) == [0]
    assert "training from iteration 2 to 6" in (tmp_path / "out.0").read_text()
