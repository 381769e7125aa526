"""A run's saves one after the other: who waits for whom, what is published, also after a fault."""

import dataclasses
import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing import background, catalog, format, save
from megatron.core.dist_checkpointing.publishing import PARTIAL
from megatron.training.checkpoint_config import CheckpointConfig
from megatron.training.checkpoints import random_states
from megatron.training.checkpoints.saver import Saver
from megatron.training.failing.failure import RunFailed, SaveFailed
from tests.unit.checkpoint_runs import Run, equal


class Beside:
    """A toy run that saves beside training, whose writes wait for a word."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, **settings: object) -> None:
        self.run, self.lines, self.saved = Run(folder), list[str](), list[int]()
        self.allowed, self.error = threading.Event(), None
        write = os.pwrite

        def gated(descriptor: int, data: memoryview, offset: int) -> int:
            assert self.allowed.wait(60)
            if self.error is not None:
                raise self.error
            return write(descriptor, data, offset)

        patch.setattr(os, "pwrite", gated)
        config = CheckpointConfig.resolve(save=str(folder), async_save=True, **settings)
        run = dataclasses.replace(self.run.as_saved, config=config, say=self.lines.append)
        self.saver = Saver(run, lambda folder, state: self.saved.append(state.iteration))

    def save(self, iteration: int, *, last: bool = False) -> None:
        self.run.train(iteration)
        self.saver.save(self.run.state, last)

    def train(self, until: int) -> None:
        """Train on, as the loop does: no update before copies are made."""
        self.saver.settle()
        self.run.train(until)


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Beside]:
    return lambda **settings: Beside(tmp_path / "save", monkeypatch, **settings)


def test_training_goes_on_and_the_save_is_of_its_iteration(
    beside: Callable[..., Beside], tmp_path: Path
) -> None:
    run = beside()
    run.save(2)
    wanted = run.run.weights()
    run.train(5)
    run.saver.look()
    assert run.saved == [] and run.run.state.iteration == 5
    assert not (tmp_path / "save" / catalog.TRACKER).exists()
    run.allowed.set()
    while not run.saved:
        run.saver.look()
    assert run.saved == [2] and catalog.read_tracker(tmp_path / "save") == 2
    loaded = Run(tmp_path / "save", seed=9).load()
    assert loaded.state.iteration == 2 and equal(loaded.weights(), wanted)
    assert "of which training waited" in run.lines[-1]


def test_a_second_save_waits_and_retention_follows_each(beside: Callable[..., Beside]) -> None:
    run = beside(save_keep_last=1)
    threading.Timer(0.2, run.allowed.set).start()
    for iteration in (1, 2, 3):
        run.save(iteration)
        assert run.saved == list(range(1, iteration))
        run.train(iteration)
    run.save(4, last=True)
    assert run.saved == [1, 2, 3, 4]  # the last one is not left to the background
    found = catalog.scan(Path(run.saver._run.config.save or ""))
    assert [one.name for one in found.complete] == [4] and found.unfinished == []
    assert run.saver.bytes > 0 and run.saver.longest > 0.1


@pytest.mark.parametrize("stops", [False, True])
def test_a_failed_save_ends_the_run_only_if_asked(
    beside: Callable[..., Beside], stops: bool
) -> None:
    run = beside(exit_on_failed_save=stops)
    run.allowed.set()
    run.save(1)
    run.saver.finish()
    run.error = OSError(28, "No space left on device")
    run.save(2)
    if stops:
        with pytest.raises(RunFailed, match="iteration 2 was not saved.*No space left"):
            run.saver.finish()
    else:
        run.saver.finish()
    assert "WARNING: saving iteration 2" in run.lines[-1]
    assert run.saved == [1]
    run.error = None
    run.save(3, last=True)
    assert run.saved == [1, 3]


def test_a_run_that_fails_finishes_the_save_under_way(
    beside: Callable[..., Beside], tmp_path: Path
) -> None:
    run = beside()
    threading.Timer(0.2, run.allowed.set).start()
    run.save(3)
    run.saver.rescue(alike=True)
    assert run.saved == [3] and catalog.read_tracker(tmp_path / "save") == 3
    assert format.read_index(tmp_path / "save" / "iter_0000003").facts["iteration"] == 3
    run.saver.rescue(alike=True)  # nothing is under way
    assert run.saved == [3]


def test_a_rescue_whose_own_write_failed_says_so(beside: Callable[..., Beside]) -> None:
    run = beside()
    run.error = OSError(28, "No space left on device")
    run.allowed.set()
    run.save(3)
    run.saver.rescue(alike=True)
    assert run.saved == []
    assert "was not finished: rank 0: [Errno 28] No space left on device" in run.lines[-1]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("what", ["contents", "staging"])
def test_memory_that_is_short_before_a_save_is_a_failed_save(
    beside: Callable[..., Beside], monkeypatch: pytest.MonkeyPatch, last: bool, what: str
) -> None:
    """Other ranks learn of it, as of any failure."""
    run = beside()
    run.allowed.set()

    def short(*words: object) -> None:
        raise MemoryError("so many bytes")

    with monkeypatch.context() as patch:
        if what == "contents":
            patch.setattr(random_states, "pack", short)
        else:
            patch.setattr(background if not last else save, "stage", short)
        with pytest.raises(SaveFailed) if last else nullcontext():
            run.save(1, last=last)
    assert "WARNING: saving iteration 1" in run.lines[-1]
    assert "MemoryError: so many bytes" in run.lines[-1]
    run.save(2, last=True)
    assert run.saved == [2]


def test_a_rescue_that_fails_does_not_hide_why_training_has(
    beside: Callable[..., Beside], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = beside()
    run.allowed.set()
    run.save(3)

    def full(root: Path, name: catalog.Name) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(catalog, "write_tracker", full)
    with pytest.raises(ZeroDivisionError):
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            run.saver.rescue(alike=True)
            raise
    assert "WARNING: ending the save that was under way failed: OSError" in run.lines[-1]
    found = catalog.newest(catalog.scan(tmp_path / "save"))
    assert found is not None and found.name == 3  # the next start finds it


def test_a_rescue_that_cannot_publish_says_so(
    beside: Callable[..., Beside], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = beside()
    run.allowed.set()
    run.save(3)
    rename = os.rename

    def refused(source: Path, target: Path) -> None:
        if str(source).endswith(PARTIAL):
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refused)
    run.saver.rescue(alike=True)
    assert run.saved == [] and "was not finished: [Errno 5] Input/output error" in run.lines[-1]
