"""Whole runs that go on where an earlier one was saved."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.core.dist_checkpointing.format import read_index
from megatron.core.dist_checkpointing.reader import Checkpoint
from tests.end_to_end.training.runs import (
    rows,
    same,
    status,
    tensors,
)


def test_res_15_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(run: Callable[..., int]) -> None:
    evaluation = ("--eval-interval", 2, "--eval-iters", 1)
    whole = ("--train-iters", 10, *evaluation)
    assert run(*whole, "--save", "whole", "--metrics-file", "whole.jsonl") == 0
    assert run(*whole, "--save", "cut", "--exit-interval", 5) == 0
    assert status("cut")["reason"] == "interval" and status("cut")["iteration"] == 5
    assert run(*whole, "--save", "cut", "--load", "cut") == 0
    straight, pieces = rows("whole.jsonl"), rows()
    assert [same(row) for row in straight] == [same(row) for row in pieces]
    assert {row["attempt"] for row in pieces if row.get("iteration", 0) > 5} == {1}
    one, other = tensors("whole/iter_0000010"), tensors("cut/iter_0000010")
    assert one.keys() == other.keys()
    for key in one:
        assert torch.equal(one[key], other[key]), key


def test_dropout_is_on_in_these_runs(run: Callable[..., int]) -> None:
    """So that the equality above says something: the masks change the loss and follow the seed."""
    assert run("--train-iters", 1) == 0
    assert run("--train-iters", 1, "--hidden-dropout", 0, "--attention-dropout", 0) == 0
    assert run("--train-iters", 1) == 0
    first, without, again = [row["lm_loss"] for row in rows()]
    assert first == again != without


def test_res_08_no_sample_is_read_twice_or_left_out(
    run: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    ramp = ("--train-iters", 10, "--rampup-batch-size", 2, 2, 12, "--save", "save")
    assert run(*ramp, "--exit-interval", 4) == 0
    assert run(*ramp, "--load", "save") == 0
    ranges = [(row["first_sample"], row["last_sample"]) for row in rows()]
    assert len(ranges) == 10
    assert ranges[0][0] == 0
    assert all(after[0] == before[1] + 1 for before, after in zip(ranges, ranges[1:], strict=False))
    assert {last - first + 1 for first, last in ranges} == {2, 4}
    first = ranges[4][0]
    assert f"the first sample is number {first} of the training set" in capfd.readouterr().out


def test_res_11_a_complete_run_is_left_alone(
    run: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ("--train-iters", 4, "--save", "save", "--load", "save")
    assert run(*flags) == 0
    before = {path: path.stat().st_mtime_ns for path in Path("save").rglob("*")}
    lines = len(rows())
    assert run(*flags) == 0
    assert {path: path.stat().st_mtime_ns for path in Path("save").rglob("*")} == before
    assert len(rows()) == lines
    assert "already complete" in capfd.readouterr().out
    # Killed after its last save, before it could say so: the next run says it.
    left = json.loads(Path("save/run_status.json").read_text())
    Path("save/run_status.json").write_text(
        json.dumps({**left, "reason": "running", "resubmit": True, "attempt": 3})
    )
    assert run(*flags) == 0
    assert json.loads(Path("save/run_status.json").read_text()) == {**left, "attempt": 3}


def test_res_13_a_skipped_last_iteration_is_saved(run: Callable[..., int]) -> None:
    assert (
        run("--train-iters", 6, "--save", "save", "--save-interval", 3, "--iterations-to-skip", 6)
        == 0
    )
    before, after = tensors("save/iter_0000003"), tensors("save/iter_0000006")
    assert before.keys() == after.keys()
    with Checkpoint(Path("save/iter_0000006")) as checkpoint:
        progress = checkpoint.index.facts["progress"]
    assert (progress["iteration"], progress["consumed_samples"]) == (6, 24)
    assert progress["skipped_samples"] == 4
    last = rows()[-1]
    assert last["skipped"] and last["lm_loss"] is None and last["grad_norm"] is None


def test_iterations_to_skip_leaves_out_their_samples_and_no_others(run: Callable[..., int]) -> None:
    assert run("--train-iters", 4, "--iterations-to-skip", 2, 3) == 0
    first, second, third, fourth = rows()
    assert second["skipped"] and third["skipped"] and not fourth["skipped"]
    assert (fourth["first_sample"], fourth["skipped_samples"]) == (12, 8)
    for row in (first, fourth):  # --clip-grad is 1
        assert row["clipped_grad_norm"] == pytest.approx(min(row["grad_norm"], 1.0), rel=1e-5)


def test_skip_train_evaluates_what_was_saved(
    run: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    evaluation = ("--eval-iters", -1)
    assert run("--train-iters", 3, "--save", "save", *evaluation) == 0
    before = {path: path.stat().st_mtime_ns for path in Path("save").rglob("*")}
    capfd.readouterr()
    assert run("--skip-train", "--load", "save", *evaluation) == 0
    out = capfd.readouterr().out
    trained = [row for row in rows() if row.get("split") == "valid"][-1]
    shown = re.search(
        r"-{60,}\n validation loss at iteration 3 on validation set \| lm loss value: (\S+) \| "
        r"lm loss PPL: (\S+) \| \n-{60,}\n",
        out,
    )
    assert shown and float(shown[1]) == pytest.approx(trained["lm_loss"], rel=1e-6)
    assert float(shown[2]) == pytest.approx(np.exp(trained["lm_loss"]), rel=1e-5)
    assert {path: path.stat().st_mtime_ns for path in Path("save").rglob("*")} == before


@pytest.mark.parametrize("precision", ["--bf16", "--fp64"])
def test_other_precisions_resume_exactly_too(run: Callable[..., int], precision: str) -> None:
    flags = (precision, "--train-iters", 4, "--save", "save")
    assert run(precision, "--train-iters", 4) == 0
    assert run(*flags, "--exit-interval", 2) == 0
    assert run(*flags, "--load", "save") == 0
    found = [same(row) for row in rows()]
    assert found[:4] == found[4:]


def test_fp16_resumes_across_overflows(
    run: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    """The scale doubles after each step, so overflows come again and again."""
    flags = ("--fp16", "--initial-loss-scale", 2**21, "--loss-scale-window", 1, "--hysteresis", 1)
    flags += ("--train-iters", 12, "--log-interval", 6)
    assert run(*flags, "--save", "straight") == 0
    out = capfd.readouterr().out
    assert run(*flags, "--save", "save", "--exit-interval", 6) == 0
    assert run(*flags, "--save", "save", "--load", "save") == 0
    found = [same(row) for row in rows()]
    assert found[:12] == found[12:]
    for half in (found[:6], found[6:12]):
        skipped = sum(row["skipped"] for row in half)
        assert 0 < skipped < 6 and not any(row["nan"] for row in half)
        assert f"loss scale: {half[-1]['loss_scale']:.1f} |" in out
        assert f"number of skipped iterations: {skipped:3d} | number of nan iterations:   0" in out
    assert found[11]["consumed_samples"] == 48
    straight, resumed = tensors("straight/iter_0000012"), tensors("save/iter_0000012")
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(x, resumed[key]) for key, x in straight.items())
    facts = [read_index(Path(f"{name}/iter_0000012")).facts for name in ("straight", "save")]
    assert facts[0]["optimizer"] == facts[1]["optimizer"]
    trained = sum(not row["skipped"] for row in found[:12])
    assert facts[0]["optimizer"]["step"] == trained
    assert facts[0]["optimizer"]["loss_scale"]["scale"] == found[11]["loss_scale"]
