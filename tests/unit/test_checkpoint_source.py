"""Which checkpoint a run starts from, and what it says of the others."""

import os
import re
import shutil
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing import catalog
from megatron.core.dist_checkpointing.format import CheckpointError
from megatron.core.dist_checkpointing.publishing import PARTIAL
from megatron.core.dist_checkpointing.reader import DamagedError
from megatron.core.utils import UserError
from megatron.training.checkpoints import source as checkpoint_source
from megatron.training.recovery_config import own_folder
from megatron.training.state import TrainState
from tests.unit.checkpoint_runs import Run, equal


def test_absent_and_empty_folders_start_from_scratch_with_one_warning(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "run_status.json").write_text("{}")
    for name in ("absent", "empty", "logs"):
        run = Run(tmp_path / name)
        before = run.weights()
        run.load()
        assert run.state == TrainState() and run.loaded.folder is None
        assert equal(before, run.weights())
        assert len(run.lines) == 1 and "starting from scratch" in run.text
        with pytest.raises(UserError, match="--exit-on-missing-checkpoint"):
            Run(tmp_path / name, exit_on_missing_checkpoint=True).load()


def test_a_first_save_that_never_finished_is_named_and_no_obstacle(tmp_path: Path) -> None:
    """Nothing was ever published, so a restart may begin again."""
    (tmp_path / f"iter_0000010{PARTIAL}").mkdir()
    run = Run(tmp_path).load()
    assert run.state.iteration == 0 and "never finished" in run.text


@pytest.mark.parametrize(
    "make",
    [
        lambda root: (root / catalog.TRACKER).write_text("10"),
        lambda root: (root / catalog.TRACKER).write_text("release"),
        lambda root: (root / "iter_0000010").mkdir(),
        lambda root: os.truncate(root / "iter_0000002" / "rank00000.bin", 10),
        lambda root: (root / "non_persistent" / "iter_0000050").mkdir(parents=True),
        lambda root: (root / "iter_50").mkdir(),
    ],
)
def test_something_like_a_checkpoint_but_not_whole_is_an_error(tmp_path: Path, make) -> None:
    if make.__code__.co_names[0] == "os":
        Run(tmp_path).train(2).save()
    make(tmp_path)
    for flags in ({}, {"pretrained_checkpoint": str(tmp_path / "elsewhere")}):
        with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
            Run(tmp_path, **flags).load()


@pytest.mark.parametrize("file", [".metadata", "mp_rank_00/model_optim_rng.pt"])
def test_a_damaged_checkpoint_of_another_program_falls_through(tmp_path: Path, file: str) -> None:
    path = tmp_path / "iter_0000003" / file
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\x80")
    with pytest.raises(CheckpointError, match=f"(?s)holds no complete checkpoint:.*{file}"):
        Run(tmp_path).load()
    Run(tmp_path / "b").train(2).save()
    (tmp_path / "b" / "iter_0000002").rename(tmp_path / "iter_0000002")
    catalog.write_tracker(tmp_path, 3)
    resumed = Run(tmp_path).load()
    assert resumed.state.iteration == 2 and f"{file}" in resumed.text


def test_the_newest_whole_one_is_loaded_and_the_others_are_named(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for until in (2, 4, 6):
        run.train(until).save()
    (tmp_path / "iter_0000006" / "rank00000.bin").unlink()
    resumed = Run(tmp_path).load()
    assert resumed.state.iteration == 4
    assert "ignored" in resumed.text and "rank00000.bin is missing" in resumed.text
    assert "names 6, but 4 is taken" in resumed.text


def test_ckpt_step_takes_the_one_named_and_lists_those_there_are(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for until in (2, 4):
        run.train(until).save()
    assert Run(tmp_path, ckpt_step=2).load().state.iteration == 2
    with pytest.raises(UserError, match=r"--ckpt-step \(3\).*complete ones: 2, 4; without"):
        Run(tmp_path, ckpt_step=3).load()


def test_an_iteration_may_be_given_another_number(tmp_path: Path) -> None:
    Run(tmp_path).train(2).save()
    run = Run(tmp_path, override_ckpt_iteration=6).load()
    assert (run.state.iteration, run.state.consumed_samples) == (6, 8)
    assert "iteration 2 counts as 6" in run.lines
    assert Run(tmp_path, override_ckpt_iteration=6, finetune=True).load().state.iteration == 0


def test_the_folder_of_one_checkpoint_can_be_named_itself(tmp_path: Path) -> None:
    Run(tmp_path / "a").train(2).save()
    run = Run(tmp_path / "b", load=str(tmp_path / "a" / "iter_0000002")).load()
    assert run.state.iteration == 2
    with pytest.raises(UserError, match=r"--ckpt-step \(1\), but .* is one checkpoint, of iter"):
        Run(tmp_path / "c", load=str(tmp_path / "a" / "iter_0000002"), ckpt_step=1).load()


def test_a_pretrained_checkpoint_gives_weights_until_the_run_has_its_own(tmp_path: Path) -> None:
    old = Run(tmp_path / "old").train(3)
    old.save()
    flags = {"pretrained_checkpoint": str(tmp_path / "old"), "seed": 9}
    run = Run(tmp_path / "new", **flags).load()
    assert equal(run.weights(), old.weights()) and run.loaded.parts == ("weights",)
    run.train(1).save()
    assert Run(tmp_path / "new", **flags).load().state.iteration == 1
    old.train(5).save()
    # Without --load the step names one of the pretrained; with it, one of the run's own.
    for step, load in ((3, None), (5, None)):
        run = Run(tmp_path / "third", **flags, ckpt_step=step, load=load).load()
        assert (run.loaded.folder, run.state.iteration) == (
            tmp_path / "old" / f"iter_{step:07d}",
            0,
        )
    with pytest.raises(UserError, match=r"--ckpt-step \(3\).*complete ones: 1"):
        Run(tmp_path / "new", **flags, ckpt_step=3).load()
    with pytest.raises(UserError, match="--pretrained-checkpoint .* holds no checkpoint"):
        Run(tmp_path / "x", pretrained_checkpoint=str(tmp_path / "absent")).load()


def test_stored_config_is_what_use_checkpoint_args_reads(tmp_path: Path) -> None:
    Run(tmp_path).train(2).save()
    assert checkpoint_source.stored_config(str(tmp_path), None) == {"lr": 0.1, "split": [9, 1]}
    assert checkpoint_source.stored_config(str(tmp_path / "absent"), None) is None


def test_stored_config_is_found_among_recovery_checkpoints_in_a_folder_apart(
    tmp_path: Path,
) -> None:
    load, apart = tmp_path / "here", tmp_path / "apart"
    Run(own_folder(str(apart), str(load))).train(2).save()
    stored = checkpoint_source.stored_config(str(load), None, apart=str(apart))
    assert stored == {"lr": 0.1, "split": [9, 1]}


@pytest.mark.parametrize("folder", ["", "non_persistent"])
def test_a_damaged_newest_one_is_named_and_the_one_before_is_taken(
    tmp_path: Path, folder: str
) -> None:
    saved = Run(tmp_path).train(2)
    saved.save()
    wanted = saved.weights()
    newest = Run(tmp_path / folder).load() if not folder else Run(tmp_path / folder)
    newest.train(3).save()
    path = tmp_path / folder / "iter_0000003" / "rank00000.bin"
    data = bytearray(path.read_bytes())
    data[3] ^= 64
    path.write_bytes(data)
    run = Run(tmp_path, seed=9).load()
    assert run.state.iteration == 2 and equal(run.weights(), wanted)
    assert f"WARNING: ignored {path.parent}: {path.parent} is damaged" in run.text
    assert "model.table" in run.text and "at iteration 2" in run.text
    # What was asked for by name has no substitute, and the check is what finds it.
    for named in (
        Run(tmp_path, ckpt_step=3),
        Run(path.parent),
        Run(tmp_path / "new", pretrained_checkpoint=str(path.parent.parent)),
    ):
        with pytest.raises(DamagedError, match=f"{path.parent} is damaged") as caught:
            named.load()
        by_step = named.config.ckpt_step is not None
        if by_step or not folder:
            assert "besides: 2. --ckpt-step takes one" in str(caught.value)
        else:  # the other one is elsewhere
            assert "No other checkpoint in" in str(caught.value)
        without = "without it the run starts from the newest that is sound"
        assert (without in str(caught.value)) == by_step
    assert Run(tmp_path, verify_integrity=False).load().state.iteration == 3


@pytest.mark.parametrize("newest", ["damaged", "gone", "set back"])
def test_a_recovery_checkpoint_takes_the_place_of_a_later_one_that_is_no_more(
    tmp_path: Path, newest: str
) -> None:
    """The tracker moved after it, to the one that cannot be taken."""
    run = Run(tmp_path).train(2)
    run.save()
    Run(tmp_path / "non_persistent").train(3).save()
    run.train(4).save()
    last = tmp_path / "iter_0000004"
    if newest == "damaged":
        os.truncate(last / "rank00000.bin", 10)
    elif newest == "gone":
        shutil.rmtree(last)
    else:
        catalog.write_tracker(tmp_path, 2)
    resumed = Run(tmp_path).load()
    assert resumed.state.iteration == (2 if newest == "set back" else 3)
    assert "iter_0000004" in resumed.text


def test_a_folder_with_another_iterations_name_is_not_taken_for_it(tmp_path: Path) -> None:
    Run(tmp_path).train(2).save()
    os.rename(tmp_path / "iter_0000002", tmp_path / "iter_0000007")
    (tmp_path / catalog.TRACKER).write_text("7")
    reason = "iter_0000007: it holds iteration 2, .*; call it iter_0000002"
    with pytest.raises(CheckpointError, match=f"(?s)no complete checkpoint.*{reason}"):
        Run(tmp_path).load()
    with pytest.raises(UserError, match=f"(?s)--ckpt-step.*{reason}"):
        Run(tmp_path, ckpt_step=7).load()
    assert Run(tmp_path / "iter_0000007").load().state.iteration == 2
    Run(tmp_path, seed=5).train(1).save()
    run = Run(tmp_path).load()
    assert run.state.iteration == 1 and "it holds iteration 2" in run.text


@pytest.mark.parametrize("flag", ["load", "pretrained_checkpoint"])
def test_a_file_in_place_of_the_folder_is_named_by_its_flag(tmp_path: Path, flag: str) -> None:
    (tmp_path / "afile").touch()
    named = f"--{flag.replace('_', '-')} ({tmp_path / 'afile'}) is a file"
    with pytest.raises(UserError, match=re.escape(named)):
        Run(tmp_path / "new", **{flag: str(tmp_path / "afile")}).load()
