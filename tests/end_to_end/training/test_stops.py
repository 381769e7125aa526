"""Whole runs that end early: signals, a stop file, losses that are no numbers."""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.dist_checkpointing.reader import Checkpoint
from tests.end_to_end.training.runs import (
    Interfering,
    flags,
    rows,
    same,
    status,
    tensors,
)
from tests.programs import ROOT


def test_opt_06_a_nan_stops_the_run_with_its_samples(
    run: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    Interfering(monkeypatch, 3, lambda: float("nan"))
    assert run("--train-iters", 5, "--save", "save", "--save-interval", 1) == 1
    error = capfd.readouterr().err
    assert "iteration 3: loss is nan on rank 0; samples 8 to 11" in error
    assert "Traceback" not in error
    left = status()
    assert left["reason"] == "failure" and not left["resubmit"] and left["iteration"] == 2
    assert left["checkpoint"] == "save/iter_0000002"
    assert not Path("save/iter_0000003").exists()


def test_opt_06_skipping_counts_and_goes_on(
    run: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    Interfering(monkeypatch, 3, lambda: float("nan"))
    flags = ("--train-iters", 5, "--skip-non-finite-iterations", 1, "--log-interval", 5)
    assert run(*flags) == 0
    bad = [row for row in rows() if row["skipped"]]
    assert [row["iteration"] for row in bad] == [3] and bad[0]["nan"]
    good = [row["lm_loss"] for row in rows() if not row["skipped"]]
    line = next(line for line in capfd.readouterr().out.splitlines() if "] iteration " in line)
    assert "number of skipped iterations:   1 | number of nan iterations:   1 |" in line
    shown = re.search(r"lm loss: (\S+)", line)
    assert shown and float(shown[1]) == pytest.approx(np.mean(good), rel=1e-6)


def test_sig_02_a_signal_saves_and_stops_cleanly(
    run: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    Interfering(monkeypatch, 3, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    before = signal.getsignal(signal.SIGUSR1)
    flags = (
        "--train-iters",
        100,
        "--save",
        "save",
        "--exit-signal-handler",
        "--exit-signal",
        "USR1",
    )
    assert run(*flags, "--micro-batch-size", 4, "--exit-code-on-early-stop", 75) == 75
    assert signal.getsignal(signal.SIGUSR1) == before
    left = status()
    assert (left["reason"], left["iteration"], left["resubmit"]) == ("signal", 3, True)
    assert left["checkpoint"] == "save/iter_0000003" and Path(left["checkpoint"]).is_dir()


def ignores(process: int | None, number: int) -> bool:
    status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    return bool(int(status.split("SigIgn:")[1].split()[0], 16) >> (number - 1) & 1)


def test_a_signal_to_all_processes_spares_the_readers(
    run: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    others = set(multiprocessing.active_children())

    def signal_everyone() -> None:
        readers = set(multiprocessing.active_children()) - others
        assert readers
        processes = [*(reader.pid for reader in readers), os.getpid()]
        # From outside: readers take their parent's signals for the order to leave.
        subprocess.run(["kill", "-TERM", *map(str, processes)], check=True)
        # Once the handler has run here, readers have had time to die of theirs; whoever ignores a
        # signal never gets it.
        handler: Any = signal.getsignal(signal.SIGTERM)
        while not handler.__self__.received:
            time.sleep(0.001)
        assert all(ignores(reader.pid, signal.SIGTERM) for reader in readers)

    Interfering(monkeypatch, 2, signal_everyone)
    stop = ("--train-iters", 50, "--save", "save", "--exit-signal-handler", "--num-workers", 1)
    assert run(*stop, "--micro-batch-size", 4) == 0
    assert (status()["reason"], status()["iteration"]) == ("signal", 2)


def test_sig_01_without_the_option_a_signal_ends_the_process_at_once(
    corpus: str, tmp_path: Path
) -> None:
    command = [sys.executable, str(ROOT / "pretrain_gpt.py")]
    command += flags(corpus, "--train-iters", 100000, "--save", "save", "--save-interval", 2)
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "iteration        3/" in line:
                break
        process.terminate()
        process.stdout.read()
        # By the signal itself: the training loop has not looked at it and left in order.
        assert process.wait(timeout=60) == -signal.SIGTERM
    left = json.loads((tmp_path / "save" / "run_status.json").read_text())
    assert left["reason"] == "running" and left["iteration"] >= 2
    assert Path(tmp_path, left["checkpoint"]).is_dir()  # published before, so it is known


def test_ctrl_c_without_the_option_is_told_from_a_failure(
    run: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    Interfering(monkeypatch, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        run("--train-iters", 100, "--save", "save", "--save-interval", 2)
    assert status() == {
        "reason": "interrupted",
        "iteration": 2,
        "checkpoint": "save/iter_0000002",
        "resubmit": False,
        "attempt": 0,
        "message": "interrupted",
    }


def test_a_stop_file_saves_stops_and_goes(
    run: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    Interfering(monkeypatch, 2, lambda: Path("save/stop").touch())
    assert run("--train-iters", 100, "--save", "save") == 0
    left = status()
    assert (left["reason"], left["iteration"], left["resubmit"]) == ("stop file", 2, False)
    assert not Path("save/stop").exists()


def test_fp16_that_overflows_at_the_smallest_scale_ends_the_run(
    run: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    scale = ("--initial-loss-scale", 2**40, "--min-loss-scale", 2**38, "--hysteresis", 1)
    assert run("--fp16", *scale, "--train-iters", 9) == 1
    assert "iteration 3: gradient norm is" in capfd.readouterr().err
    assert [row["loss_scale"] for row in rows()] == [2**39, 2**38]
    # What the message says instead:
    assert run("--fp16", *scale, "--train-iters", 4, "--skip-non-finite-iterations", 2) == 0
    assert [row["nan"] for row in rows()[2:]] == [False, False, True, True]


@pytest.mark.parametrize("stop", ["signal", "stop file"])
def test_a_stop_while_a_save_is_under_way_loses_nothing(
    run: Callable[..., int], monkeypatch: pytest.MonkeyPatch, stop: str
) -> None:
    """Both saves, that under way and that of the stop, are whole; the run goes on bit for bit."""
    saving = ("--save-interval", 1, "--async-save", "--micro-batch-size", 4, "--load")
    assert run("--train-iters", 5, "--save", "straight", *saving, "straight") == 0
    expected = [same(row) for row in rows()]
    Path("metrics.jsonl").unlink()
    write, under_way = os.pwrite, list[bool]()

    def slow(descriptor: int, data: memoryview, offset: int) -> int:
        time.sleep(0.02)
        return write(descriptor, data, offset)

    def act() -> None:
        under_way.append(any(Path("save").glob("iter_0000002.*.partial")))
        if stop == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            Path("save/stop").touch()

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", slow)
        Interfering(patch, 3, act)
        words = ("--train-iters", 5, "--save", "save", *saving, "save", "--exit-signal-handler")
        assert run(*words) == 0
    assert under_way == [True]
    assert (status()["reason"], status()["iteration"]) == (stop, 3)
    for iteration in (1, 2, 3):
        with Checkpoint(Path(f"save/iter_{iteration:07d}")) as checkpoint:
            assert checkpoint.damages() == []
    assert run("--train-iters", 5, "--save", "save", *saving, "save") == 0
    assert [same(row) for row in rows()] == expected
    ours, theirs = tensors("save/iter_0000005"), tensors("straight/iter_0000005")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
