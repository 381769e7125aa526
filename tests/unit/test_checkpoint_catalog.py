"""Which checkpoints there are, which are kept, and what a failed or killed save leaves."""

import os
import random
import resource
import signal
import time
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing import catalog, format, save
from megatron.core.dist_checkpointing.format import CheckpointError
from megatron.core.dist_checkpointing.publishing import PARTIAL, REPLACED
from megatron.core.dist_checkpointing.reader import Checkpoint
from tests.unit.checkpoint_files import WORLD, item, planned, two, write

# The catalog


def test_the_tracker_set_back_by_hand_is_obeyed(tmp_path: Path) -> None:
    root = two(tmp_path)
    catalog.write_tracker(root, 10)
    assert catalog.newest(catalog.scan(root)).name == 10


def test_a_save_after_going_back_is_the_newest_though_its_number_is_lower(tmp_path: Path) -> None:
    root = two(tmp_path)
    write(root / catalog.folder_name(15), planned(), {"iteration": 15})
    catalog.write_tracker(root, 15)
    assert catalog.newest(catalog.scan(root)).name == 15


def test_a_checkpoint_published_before_the_tracker_moved_is_the_newest(tmp_path: Path) -> None:
    root = two(tmp_path)
    write(root / catalog.folder_name(30), planned(), {"iteration": 30})
    later = time.time() + 100
    os.utime(root / catalog.folder_name(30) / format.INDEX, (later, later))
    assert catalog.newest(catalog.scan(root)).name == 30


def test_an_older_checkpoint_whose_files_were_touched_is_not_newer(tmp_path: Path) -> None:
    root = two(tmp_path)
    write(root / catalog.folder_name(15), planned(), {"iteration": 15})
    catalog.write_tracker(root, 15)
    later = time.time() + 100
    os.utime(root / "iter_0000020" / format.INDEX, (later, later))
    assert catalog.newest(catalog.scan(root)).name == 15


def test_a_tracker_that_names_a_missing_folder_is_reported(tmp_path: Path) -> None:
    root = two(tmp_path)
    catalog.write_tracker(root, 99)
    held = catalog.scan(root)
    assert catalog.newest(held).name == 20
    assert "does not exist" in held.ignored[root / "iter_0000099"]


def test_a_stop_between_the_two_renames_of_a_rewrite_loses_nothing(tmp_path: Path) -> None:
    root = two(tmp_path)
    folder = root / catalog.folder_name(20)
    os.rename(folder, folder.with_name(folder.name + REPLACED))
    assert catalog.newest(catalog.scan(root)).name == 20


def test_saving_an_iteration_again_replaces_it(tmp_path: Path) -> None:
    target = torch.zeros(4)
    for number in (1.0, 2.0):
        target.fill_(number)
        save.save([item("a", target)], tmp_path / "iter_0000001", {}, WORLD)
    with Checkpoint(tmp_path / "iter_0000001") as checkpoint:
        assert checkpoint.read("a").tolist() == [2.0] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000001"]


def test_a_rewrite_that_cannot_be_published_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = tmp_path / "iter_0000001"
    save.save([item("a", torch.ones(4))], final, {}, WORLD)
    rename, moves = os.rename, []

    def stubborn(source: Path, target: Path) -> None:
        moves.append(target)
        if str(source).endswith(PARTIAL):
            # Even now the old one is there under a name that a start-up looks for.
            assert [found.name for found in catalog.scan(tmp_path).complete] == [1]
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(save.os, "rename", stubborn)
    with pytest.raises(save.SaveError, match="Input/output error"):
        save.save([item("a", torch.zeros(4))], final, {}, WORLD)
    assert len(moves) == 3 and [path.name for path in tmp_path.iterdir()] == [final.name]
    with Checkpoint(final) as checkpoint:
        assert checkpoint.read("a").tolist() == [1.0] * 4


@pytest.mark.parametrize("text", ["", "ten", "1\n2", "-3"])
def test_a_tracker_that_is_no_number_is_an_error_that_shows_it(tmp_path: Path, text: str) -> None:
    (tmp_path / catalog.TRACKER).write_text(text)
    with pytest.raises(CheckpointError, match=catalog.TRACKER):
        catalog.read_tracker(tmp_path)
    assert not catalog.scan(tmp_path).is_empty


# CKPT-20: retention


def saved(root: Path, *iterations: int) -> None:
    for iteration in iterations:
        save.save([item("a", torch.zeros(3))], root / catalog.folder_name(iteration), {}, WORLD)
        catalog.write_tracker(root, iteration)


def names(root: Path) -> list[int]:
    return sorted(int(p.name[5:]) for p in root.iterdir() if p.is_dir())


def test_ckpt_20_two_of_five_remain_and_the_tracker_is_valid(tmp_path: Path) -> None:
    for iteration in (1, 2, 3, 4, 5):
        saved(tmp_path, iteration)
        catalog.prune(tmp_path, 2, None)
    assert names(tmp_path) == [4, 5]
    assert catalog.newest(catalog.scan(tmp_path)).name == 5


def test_ckpt_20_multiples_pins_and_incomplete_ones_are_kept(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, 4, 5, 6)
    (tmp_path / "iter_0000001" / catalog.PIN).touch()
    (tmp_path / "iter_0000002" / "rank00000.bin").unlink()
    removed = catalog.prune(tmp_path, 1, 4)
    assert [path.name for path in removed] == ["iter_0000003", "iter_0000005"]
    assert names(tmp_path) == [1, 2, 4, 6]


def test_ckpt_20_what_lies_beyond_the_tracker_is_left_alone(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20, 30)
    saved(tmp_path, 15)
    catalog.prune(tmp_path, 1, None)
    assert names(tmp_path) == [15, 20, 30]


def test_ckpt_20_a_stop_while_removing_is_cleared_later(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    os.rename(tmp_path / "iter_0000001", tmp_path / f"iter_0000001{catalog.DELETED}")
    held = catalog.scan(tmp_path)
    assert [found.name for found in held.complete] == [2] and held.ignored == {}
    (tmp_path / f".{catalog.TRACKER}.abc").touch()
    catalog.clear(tmp_path)
    assert names(tmp_path) == [2] and len(list(tmp_path.iterdir())) == 2


# CKPT-21 and kills


def test_ckpt_21_a_full_disk_leaves_the_older_checkpoint_and_no_rubbish(tmp_path: Path) -> None:
    """A file-size limit below the checkpoint's size stands for the full disk."""
    saved(tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
    try:
        with pytest.raises(save.SaveError, match="File too large"):
            save.save([item("a", torch.zeros(2**20))], tmp_path / "iter_0000002", {}, WORLD)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(tmp_path) == [1]
    with Checkpoint(catalog.newest(catalog.scan(tmp_path)).folder) as checkpoint:
        assert checkpoint.damages() == []
    save.save([item("a", torch.zeros(2**20))], tmp_path / "iter_0000002", {}, WORLD)


def test_ckpt_21_too_little_space_is_seen_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 1)
    monkeypatch.setattr(save.shutil, "disk_usage", lambda path: type("", (), {"free": 1000})())
    monkeypatch.setattr(save, "write", lambda *args: pytest.fail("nothing may be written"))
    with pytest.raises(save.SaveError, match=r"1000 B free, a checkpoint takes 4.00 KiB"):
        save.save([item("a", torch.zeros(1024))], tmp_path / "iter_0000002", {}, WORLD)
    assert names(tmp_path) == [1]


def _saves_until_killed(root: Path, report: int) -> None:
    torch.set_num_threads(1)  # a forked process has no pool of threads, and would wait for one
    tensor = torch.zeros(300_000, dtype=torch.int32)
    first = (catalog.read_tracker(root) or 0) + 1
    for iteration in range(first, first + 10_000):
        tensor.fill_(iteration)
        catalog.clear(root)
        final = root / catalog.folder_name(iteration)
        save.save([item("a", tensor), item("b", tensor[::3])], final, {}, WORLD)
        catalog.write_tracker(root, iteration)
        os.write(report, iteration.to_bytes(8, "little"))
        catalog.prune(root, 2, None)


@pytest.mark.parametrize("kills", [8, pytest.param(400, marks=pytest.mark.slow)])
def test_kills_at_random_moments_never_lose_or_forge_a_checkpoint(
    tmp_path: Path, kills: int
) -> None:
    """The newest complete one is whole and no older than what was last said to be saved."""
    draw, acknowledged = random.Random(5), 0
    for _ in range(kills):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                _saves_until_killed(tmp_path, writing)
            finally:
                os._exit(1)
        os.close(writing)
        os.read(reading, 8)  # one save at least, so that each round kills at another place
        time.sleep(draw.uniform(0, 0.15))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        while block := os.read(reading, 8):
            acknowledged = int.from_bytes(block, "little")
        os.close(reading)
        found = catalog.newest(catalog.scan(tmp_path))
        assert found is not None and found.name >= acknowledged
        with Checkpoint(found.folder) as checkpoint:
            assert checkpoint.damages() == []
            assert (checkpoint.read("a") == found.name).all()
            assert (checkpoint.read("b") == found.name).all()
