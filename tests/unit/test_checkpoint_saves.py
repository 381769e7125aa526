"""What a save says, keeps, clears and leaves when it fails."""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.core.dist_checkpointing import catalog, format, save
from megatron.core.dist_checkpointing.format import CheckpointError
from megatron.core.dist_checkpointing.publishing import PARTIAL
from megatron.core.dist_checkpointing.reader import Checkpoint
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
    arguments = (run.config, MESH, [run.model], run.optimizer, run.lines.append)
    checkpoint_save.warn_of_space(*arguments)
    assert run.lines == []
    monkeypatch.setattr(save.shutil, "disk_usage", lambda path: type("", (), {"free": 100})())
    checkpoint_save.warn_of_space(*arguments)
    assert len(run.lines) == 1 and "100 B free" in run.text


def test_a_save_clears_what_a_killed_one_left(tmp_path: Path) -> None:
    (tmp_path / f"iter_0000009{PARTIAL}").mkdir(parents=True)
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
