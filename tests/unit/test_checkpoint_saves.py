"""What a save says, keeps, clears and leaves when it fails."""

import os
import re
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.core.dist_checkpointing import catalog, format, publishing, save
from megatron.core.dist_checkpointing.format import CheckpointError
from megatron.core.dist_checkpointing.publishing import PARTIAL
from megatron.core.dist_checkpointing.reader import Checkpoint
from megatron.core.utils import sync_folder, usable_cores
from megatron.training.checkpoints import load as checkpoint_load
from megatron.training.checkpoints import random_states
from megatron.training.checkpoints import save as checkpoint_save
from tests.unit.checkpoint_runs import BF16, MESH, Run, equal


def test_the_line_of_a_save_is_megatrons(tmp_path: Path) -> None:
    run = Run(tmp_path).train(2)
    saved = run.save()
    assert f"  successfully saved checkpoint from iteration       2 to {tmp_path} (" in run.text
    assert saved.folder == tmp_path / "iter_0000002" and saved.error is None
    assert (tmp_path / catalog.TRACKER).read_text() == "2"
    assert saved.bytes == (saved.folder / "rank00000.bin").stat().st_size


def test_ckpt_20_save_keep_last_and_retain_interval(tmp_path: Path) -> None:
    run = Run(tmp_path, save_keep_last=2, save_retain_interval=4)
    for until in range(1, 8):
        run.train(until).save()
    held = catalog.scan(tmp_path)
    assert [found.name for found in held.complete] == [4, 6, 7]
    assert Run(tmp_path).load().state.iteration == 7
    assert "removed iter_0000005" in run.text


def test_ckpt_21_a_failed_save_is_reported_and_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, save_keep_last=1).train(2)
    run.save()
    good = run.weights()

    def full(descriptor: int, data: memoryview, offset: int) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        failed = run.train(4).save()
    assert failed.folder is None and "No space left on device" in failed.error
    assert "WARNING: saving iteration 4" in run.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000002", catalog.TRACKER]
    resumed = Run(tmp_path, seed=9).load()
    assert resumed.state.iteration == 2 and equal(resumed.weights(), good)
    assert run.save().error is None


def test_ckpt_21_too_little_space_is_said_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "new")
    checkpoint_save.warn_of_space(run.as_saved)
    assert run.lines == []
    monkeypatch.setattr(save.shutil, "disk_usage", lambda path: type("", (), {"free": 100})())
    checkpoint_save.warn_of_space(run.as_saved)
    assert len(run.lines) == 1 and "100 B free" in run.text


def test_a_save_clears_what_a_killed_one_left(tmp_path: Path) -> None:
    left = tmp_path / f"iter_0000009{PARTIAL}"
    left.mkdir(parents=True)
    past = time.time() - 2 * publishing.PATIENCE
    os.utime(left, (past, past))
    Run(tmp_path).train(2).save()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000002", catalog.TRACKER]


def test_names_in_the_file_are_the_models(tmp_path: Path) -> None:
    Run(tmp_path, BF16).train(1).save()
    with Checkpoint(tmp_path / "iter_0000001") as checkpoint:
        names = {key for key in checkpoint.index.tensors if key.endswith("matrix")}
        assert names == {
            "model.matrix",
            "optimizer.master.matrix",
            "optimizer.exp_avg.matrix",
            "optimizer.exp_avg_sq.matrix",
        }
        facts = checkpoint.facts
    assert facts["progress"]["consumed_samples"] == 4
    assert (facts["vocabulary"], facts["vocabulary_rows"], facts["objective"]) == (5, 5, "tokens")


def test_random_states_that_one_rank_cannot_read_stop_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Run(tmp_path).train(2).save()

    def broken(states: Tensor, device: torch.device) -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(random_states, "unpack", broken)
        with pytest.raises(CheckpointError, match="the disk is gone"):
            Run(tmp_path).load()
    # This rank reads its states, another could not: this one does not go on alone.
    monkeypatch.setattr(save.comm, "gather_objects", lambda mine, axis: [mine, "of another rank"])
    with pytest.raises(CheckpointError, match="of another rank"):
        checkpoint_load._load_random(
            Checkpoint(tmp_path / "iter_0000002", format.read_index(tmp_path / "iter_0000002")),
            MESH,
            print,
        )


# What a power cut leaves


class Flushes:
    """Notes which folders are flushed, and which names move, in order."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, str]] = []
        fsync, rename, replace = os.fsync, os.rename, os.replace

        def flushed(descriptor: int) -> None:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            self.seen.append(("flush", Path(path).name))
            fsync(descriptor)

        def renamed(source: Path, target: Path) -> None:
            self.seen.append(("rename", Path(target).name))
            rename(source, target)

        def replaced(source: Path, target: Path) -> None:
            self.seen.append(("rename", Path(target).name))
            replace(source, target)

        patch.setattr(os, "fsync", flushed)
        patch.setattr(os, "rename", renamed)
        patch.setattr(os, "replace", replaced)


def test_every_name_is_on_disk_before_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "above" / "save").train(1)
    flushes = Flushes(monkeypatch)
    assert run.save().error is None
    seen = [
        (what, re.sub(r"\.[0-9a-f]{8}\.partial", ".partial", name)) for what, name in flushes.seen
    ]
    after = {name: seen[place + 1] for place, (what, name) in enumerate(seen) if what == "rename"}
    assert after == {
        "rank00000.done": ("flush", "iter_0000001.partial"),
        format.INDEX: ("flush", "iter_0000001.partial"),
        "iter_0000001": ("flush", "save"),
        catalog.TRACKER: ("flush", "save"),
    }
    published = seen.index(("rename", "iter_0000001"))
    assert seen[published - 1] == ("flush", "iter_0000001.partial")  # done-marks are gone
    # The folders that were made for it, too.
    assert seen[:2] == [("flush", tmp_path.name), ("flush", "above")]


def test_a_checkpoint_that_could_not_be_flushed_is_said_to_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path).train(1)
    run.save()
    wanted = run.train(2).weights()

    def fails(folder: Path) -> None:
        if folder == tmp_path:
            raise OSError(5, "Input/output error")
        sync_folder(folder)

    with monkeypatch.context() as patch:
        patch.setattr(publishing, "sync_folder", fails)
        saved = run.save()
    assert saved.folder is None
    assert f"{tmp_path / 'iter_0000002'} is in place and whole, but its name" in run.lines[-1]
    assert "may not survive a power cut: [Errno 5]" in run.lines[-1]
    assert catalog.read_tracker(tmp_path) == 1
    again = Run(tmp_path, seed=9).load()  # as after a kill before the tracker moved
    assert again.state.iteration == 2 and equal(again.weights(), wanted)


def test_a_tracker_that_cannot_move_is_told_from_a_save_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path).train(1)

    def fails(root: Path, name: catalog.Name) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(catalog, "write_tracker", fails)
    assert run.save().folder is None
    assert "iter_0000001 is in place and whole, but moving the tracker failed" in run.lines[-1]
    assert [one.name for one in catalog.scan(tmp_path).complete] == [1]


def test_retention_reads_each_index_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, read = Run(tmp_path, save_keep_last=4), list[str]()
    parse = format.parse_index

    def counted(text: str, origin: str) -> format.Index:
        if origin.endswith(format.INDEX):
            read.append(origin)
        return parse(text, origin)

    monkeypatch.setattr(format, "parse_index", counted)
    for until in range(1, 9):
        run.train(until).save()
    assert len(read) == len(set(read)) == 8
    kept = sorted(path.name for path in tmp_path.glob("iter_*"))
    assert kept == [f"iter_{number:07d}" for number in (5, 6, 7, 8)]


def test_cores_are_counted_without_linuxs_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_cores() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")
    assert usable_cores() == os.cpu_count()
