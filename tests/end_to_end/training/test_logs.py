"""What whole runs log: timers, TensorBoard, memory."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.training.runs import rows


def test_timers_are_printed_when_they_measure_something(
    run: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("--train-iters", 2) == 0
    assert "across ranks" not in capfd.readouterr().out
    assert run("--train-iters", 2, "--timing-log-level", 1) == 0
    out = capfd.readouterr().out
    block = r"\(min, max\) time across ranks \(ms\):\n {4}forward-backward \.{31}: \(\d+\.\d\d, "
    assert len(re.findall(block, out)) == 2
    assert run("--train-iters", 1, "--save", "save") == 0
    assert re.search(r"across ranks \(ms\):\n {4}save-checkpoint \.+: \(", capfd.readouterr().out)


def test_tensorboard_has_the_usual_tags_and_forgets_what_a_resume_replaces(
    run: Callable[..., int],
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = ("--tensorboard-dir", "tb", "--save", "save", "--save-interval", 2)
    flags += ("--eval-interval", 2, "--eval-iters", 1, "--log-validation-ppl-to-tensorboard")
    assert run(*flags, "--train-iters", 6, "--exit-interval", 5) == 0
    assert run(*flags, "--train-iters", 6, "--load", "save", "--ckpt-step", 4) == 0
    events = EventAccumulator("tb")
    events.Reload()
    tags = set(events.Tags()["scalars"])
    for tag in ("lm loss", "learning-rate", "batch-size", "loss-scale", "grad-norm"):
        assert {tag, f"{tag} vs samples"} <= tags
    assert {"iteration-time", "lm loss validation", "lm loss validation ppl"} <= tags
    assert [event.step for event in events.Scalars("lm loss")] == [1, 2, 3, 4, 5, 6]
    by_iteration = {row["iteration"]: row for row in rows() if "split" not in row}
    for event in events.Scalars("lm loss"):
        assert event.value == pytest.approx(by_iteration[event.step]["lm_loss"], rel=1e-6)


def test_activations_are_counted_in_the_iterations_that_are_reported(
    run: Callable[..., int],
) -> None:
    """As planned, but for a twentieth, and without a trace in any number."""
    assert run("--train-iters", 3) == 0
    plain = [row["lm_loss"] for row in rows()]
    Path("metrics.jsonl").unlink()
    assert run("--train-iters", 3, "--log-memory-interval", 2) == 0
    training = [row for row in rows() if "lm_loss" in row]
    assert [row["lm_loss"] for row in training] == plain
    (reported,) = [row for row in rows() if "measured_bytes" in row]
    planned = reported["planned_bytes"]["activations"]
    assert reported["measured_bytes"]["activations"] == pytest.approx(planned, rel=0.05)
