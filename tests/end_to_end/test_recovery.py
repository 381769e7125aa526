"""Recovery checkpoints between the regular ones, in shared folders."""

import signal
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing import catalog
from megatron.training.recovery_config import own_folder
from tests.end_to_end.interruptions import LIMIT, start
from tests.programs import assert_rows_equal, metrics

RARELY = "--save save --load save --save-interval 100 --train-iters 6"
OFTEN = "--non-persistent-save-interval 2 --non-persistent-ckpt-type global"


def folders(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


@pytest.mark.parametrize(
    "apart",
    ["", pytest.param("--non-persistent-global-ckpt-dir apart", marks=pytest.mark.slow)],
)
def test_ckpt_15_a_crash_before_the_first_regular_save_costs_one_iteration(
    tmp_path: Path, apart: str
) -> None:
    where = tmp_path / "save" / "non_persistent"
    if apart:
        where = own_folder(str(tmp_path / "apart"), str(tmp_path / "save"))
    words = f"{RARELY} {OFTEN} {apart}"
    assert start(tmp_path, 1, words, 0, "training", 6).codes(LIMIT) == [-signal.SIGKILL]
    assert folders(where) == ["iter_0000004"] and not list((tmp_path / "save").glob("iter_*"))
    (tmp_path / "out.0").unlink()
    assert start(tmp_path, 1, words).codes(LIMIT) == [0]
    printed = (tmp_path / "out.0").read_text()
    shown = where.relative_to(tmp_path)
    assert (
        f"recovery checkpoint {shown}/iter_0000004 is newer than any checkpoint of sav" in printed
    )
    assert "training from iteration 4 to 6" in printed
    # The regular one, at the end, is newer than those; none was left out.
    assert catalog.read_tracker(tmp_path / "save") == 6 and folders(where) == ["iter_0000004"]
    rows = metrics(tmp_path / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5, 5, 6]
    assert_rows_equal(rows[4:5], rows[5:6])


def test_ckpt_15_whichever_is_newest_is_taken(tmp_path: Path) -> None:
    """Regular ones at 3 and 6, recovery ones at 2, 4: a crash in 6 goes on at 4, one in 7 at 6."""
    words = f"--save save --load save --save-keep-last 2 --save-interval 3 --train-iters 8 {OFTEN}"
    for first, found in ((6, "4"), (7, "6")):
        assert start(tmp_path, 1, words, 0, "training", first).codes(LIMIT) == [-signal.SIGKILL]
        (tmp_path / "out.0").unlink()
        if first == 6:
            # It is killed once more before anything is saved.
            assert start(tmp_path, 1, words, 0, "training", 5).codes(LIMIT) == [-signal.SIGKILL]
            assert f"training from iteration {found} to 8" in (tmp_path / "out.0").read_text()
    assert start(tmp_path, 1, words).codes(LIMIT) == [0]
    assert "training from iteration 6 to 8" in (tmp_path / "out.0").read_text()
    assert folders(tmp_path / "save") == ["iter_0000006", "iter_0000008", "non_persistent"]
