"""What a run prints and writes, against lines and numbers worked out by hand."""

import json
import math
import sys
import types
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.core.utils import UserError
from megatron.training.log_config import LoggingConfig
from megatron.training.records import log_line
from megatron.training.records.metrics import Facts, Iteration, Metrics
from megatron.training.records.writers import (
    JsonLines,
    TensorBoard,
    Wandb,
    Writer,
    last_attempt,
    memory_tags,
    tags,
)
from megatron.training.timers import Timers, timers_block

NOW = datetime(2026, 1, 31, 12)


def facts(**changes: Any) -> Facts:
    values: dict[str, Any] = {
        "train_iters": 100,
        "seq_length": 8,
        "world_size": 2,
        "flops_per_sample": 1e12,
        "peak_flops": None,
        "attempt": 0,
        "memory": lambda: 7,
    }
    return Facts(**(values | changes))


def iteration(number: int, **changes: Any) -> Iteration:
    values: dict[str, Any] = {
        "iteration": number,
        "consumed_samples": 4 * number,
        "skipped_samples": 0,
        "samples": range(4 * (number - 1), 4 * number),
        "learning_rate": 1e-4,
        "losses": {"lm loss": float(number)},
        "grad_norm": torch.tensor(1.2344, dtype=torch.float64),
        "elapsed_ms": 100.0,
    }
    return Iteration(**(values | changes))


def test_the_training_line_has_the_known_shape() -> None:
    interval = log_line.Interval(
        iteration=10,
        train_iters=100,
        consumed_samples=320,
        elapsed_ms=123.4,
        throughput=1.2,
        learning_rate=1e-4,
        global_batch_size=32,
        losses={"lm loss": 8.123456},
        grad_norm=1.234,
        eta_seconds=751,
    )
    assert log_line.training_line(NOW, interval) == (
        " [2026-01-31 12:00:00.000000] iteration       10/     100 | consumed samples:          320"
        " | elapsed time per iteration (ms): 123.4 | throughput per GPU (TFLOP/s/GPU): 1.2 |"
        " learning rate: 1.000000E-04 | global batch size:    32 | lm loss: 8.123456E+00 |"
        " loss scale: 1.0 | grad norm: 1.234 | number of skipped iterations:   0 |"
        " number of nan iterations:   0 | ETA: 0:12:31 |"
    )


def test_a_rate_of_embedding_and_head_is_shown_and_written(tmp_path: Path) -> None:
    lines: list[str] = []
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(facts(), [JsonLines(str(path))], lines.append)
    metrics.add(iteration(1, decoupled_learning_rate=3e-3))
    metrics.print_line(NOW)
    metrics.add(iteration(2))
    metrics.print_line(NOW)
    metrics.close()
    assert "| learning rate: 1.000000E-04 | decoupled learning rate: 3.000000E-03 |" in lines[0]
    assert "decoupled" not in lines[1]
    first, second = map(json.loads, path.read_text().splitlines())
    assert first["decoupled_learning_rate"] == 3e-3 and "decoupled_learning_rate" not in second
    named = tags({**first, "loss_names": {}, "group_names": {}}, LoggingConfig.resolve())
    assert named["decoupled-learning-rate"] == 3e-3


def test_opt_04_both_norms_are_written(tmp_path: Path) -> None:
    lines: list[str] = []
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(facts(), [JsonLines(str(path))], lines.append)
    metrics.add(iteration(1, clipped_norm=torch.tensor(1.0)))
    metrics.add(iteration(2, grad_norm=None, skipped=True))
    metrics.print_line(NOW)
    metrics.close()
    first, second = map(json.loads, path.read_text().splitlines())
    assert (first["grad_norm"], first["clipped_grad_norm"]) == (1.2344, 1.0)
    assert second["grad_norm"] is None and "clipped_grad_norm" not in second
    names = {"loss_names": {}, "group_names": {}}
    found = tags({**first, **names}, LoggingConfig.resolve())
    assert (found["grad-norm"], found["grad-norm-clipped"]) == (1.2344, 1.0)
    assert "grad-norm-clipped" not in tags({**second, **names}, LoggingConfig.resolve())


def test_norms_of_groups_are_shown_and_written(tmp_path: Path) -> None:
    lines: list[str] = []
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(facts(), [JsonLines(str(path))], lines.append)
    norms = {"decay": torch.tensor(3.0), "muon decay": torch.tensor(math.nan)}
    metrics.add(iteration(1, group_norms=norms))
    metrics.print_line(NOW)
    metrics.close()
    assert (
        "| grad norm: 1.234 | grad norm of decay: 3.000 | grad norm of muon decay: nan |"
        in (lines[0])
    )
    (row,) = map(json.loads, path.read_text().splitlines())
    assert (row["grad_norm_decay"], row["grad_norm_muon_decay"]) == (3.0, None)
    names = {"loss_names": {}, "group_names": {"grad_norm_decay": "decay"}}
    assert tags({**row, **names}, LoggingConfig.resolve())["grad-norm decay"] == 3.0


def test_validation_lines_stand_between_rules() -> None:
    rule, line, again = log_line.validation_lines("iteration 5", {"lm loss": 2.0}).split("\n")
    assert line == " validation loss at iteration 5 | lm loss value: 2.000000E+00 | " + (
        "lm loss PPL: 7.389056E+00 | "
    )
    assert rule == again == "-" * (len(line) + 1)


def test_durations() -> None:
    assert log_line.duration(3723.4) == "1:02:03"
    assert log_line.duration(2 * 86400 + 59) == "2d 0:00:59"


def test_the_loss_is_the_mean_of_iterations_that_were_not_skipped() -> None:
    lines: list[str] = []
    metrics = Metrics(facts(), [], lines.append)
    metrics.add(iteration(1))
    metrics.add(iteration(2, losses={"lm loss": math.nan}, skipped=True, nan=True, grad_norm=None))
    metrics.add(iteration(3))
    metrics.print_line(NOW)
    assert "lm loss: 2.000000E+00 |" in lines[0]
    assert "number of skipped iterations:   1 | number of nan iterations:   1 |" in lines[0]
    metrics.add(iteration(4))
    metrics.print_line(NOW)
    assert "lm loss: 4.000000E+00 |" in lines[1]
    assert "skipped iterations:   0" in lines[1]


def test_auxiliary_losses_keep_their_names(tmp_path: Path) -> None:
    lines: list[str] = []
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(facts(), [JsonLines(str(path))], lines.append)
    losses = {"lm loss": 2.0, "mtp_1 loss": 3.0}
    metrics.add(iteration(1, losses=losses))
    metrics.print_line(NOW)
    metrics.validation(iteration=1, consumed_samples=4, losses=losses, where="iteration 1")
    metrics.close()
    assert "| lm loss: 2.000000E+00 | mtp_1 loss: 3.000000E+00 |" in lines[0]
    assert "| mtp_1 loss value: 3.000000E+00 |" in lines[1]
    for row in map(json.loads, path.read_text().splitlines()):
        assert (row["lm_loss"], row["mtp_1_loss"]) == (2.0, 3.0)


def test_an_interval_without_a_trained_iteration_has_no_loss() -> None:
    lines: list[str] = []
    metrics = Metrics(facts(), [], lines.append)
    metrics.add(iteration(1, losses={"lm loss": math.nan}, skipped=True))
    metrics.print_line(NOW)
    assert "lm loss" not in lines[0] and "number of skipped iterations:   1 |" in lines[0]


def test_rates_leave_out_the_first_iteration() -> None:
    lines: list[str] = []
    metrics = Metrics(facts(), [], lines.append, show_throughput=True)
    metrics.add(iteration(1, elapsed_ms=10_000.0))
    metrics.add(iteration(2, elapsed_ms=100.0))
    metrics.print_line(NOW)
    # 4 samples of 1 TFLOP in 0.1 s on 2 devices; 4 samples of 8 tokens in 0.1 s; 98 x 0.1 s left.
    assert "throughput per GPU (TFLOP/s/GPU): 20.0 |" in lines[0]
    assert "tokens per second: 320 |" in lines[0]
    assert "ETA: 0:00:10 |" in lines[0]
    assert "elapsed time per iteration (ms): 5050.0 |" in lines[0]


def test_rows_have_full_precision(tmp_path: Path) -> None:
    path = str(tmp_path / "logs" / "metrics.jsonl")
    loss = 1 / 3 + 1e-15
    metrics = Metrics(facts(peak_flops=40e12), [JsonLines(path)], lambda line: None)
    metrics.add(iteration(1, losses={"lm loss": torch.tensor(loss, dtype=torch.float64)}))
    assert not Path(path).read_text()  # values wait on the device
    metrics.flush()
    row = json.loads(Path(path).read_text())
    assert row["lm_loss"] == loss
    expected = {
        "iteration": 1,
        "consumed_samples": 4,
        "consumed_tokens": 32,
        "grad_norm": 1.2344,
        "learning_rate": 1e-4,
        "loss_scale": 1.0,
        "skipped": False,
        "elapsed_ms": 100.0,
        "tokens_per_second": 320.0,
        "mfu": 0.5,
        "memory_bytes": 7,
        "attempt": 0,
        "first_sample": 0,
        "last_sample": 3,
    }
    assert {name: row[name] for name in expected} == expected


def test_validation_rows(tmp_path: Path) -> None:
    path = str(tmp_path / "metrics.jsonl")
    metrics = Metrics(facts(), [JsonLines(path)], lambda line: None)
    metrics.validation(
        iteration=3, consumed_samples=12, losses={"lm loss": 2.5}, where="iteration 3"
    )
    metrics.close()
    row = json.loads(Path(path).read_text())
    assert (row["iteration"], row["split"], row["lm_loss"]) == (3, "valid", 2.5)


def test_a_metrics_file_survives_a_killed_run(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert last_attempt(str(path)) is None
    path.write_text('{"iteration": 1, "attempt": 2}\n{"iteration": 2, "att')
    assert last_attempt(str(path)) == 2
    writer = JsonLines(str(path))
    writer.validation({"iteration": 2, "attempt": 3})
    writer.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["attempt"] for row in rows] == [2, 3]


def test_memory_is_printed_and_written_beside_its_plan(tmp_path: Path) -> None:
    printed: list[str] = []
    metrics = Metrics(facts(attempt=2), [JsonLines(str(tmp_path / "m.jsonl"))], printed.append)
    metrics.add(iteration(1))
    measured = {"weights": 1000, "masters": 0, "resident": 5_000_000}
    metrics.memory(1, 3, measured, {"weights": 1000, "masters": 0, "states": 7})
    lines = printed[0].splitlines()
    assert lines[0].split() == [
        *"memory after iteration 1 on pipeline rank 3 (bytes)".split(),
        "measured",
        "planned",
    ]
    assert [line.split() for line in lines[1:]] == [
        ["weights", "1,000", "1,000"],
        ["states", "-", "7"],
        ["resident", "5,000,000", "-"],
    ]
    first, second = map(json.loads, (tmp_path / "m.jsonl").read_text().splitlines())
    assert first["lm_loss"] == 1.0  # what came before is written before
    assert second == {
        "iteration": 1,
        "pipeline_rank": 3,
        "measured_bytes": measured,
        "planned_bytes": {"weights": 1000, "masters": 0, "states": 7},
        "attempt": 2,
    }
    assert memory_tags(second) == {
        "memory weights of pipeline rank 3": 1000,
        "memory masters of pipeline rank 3": 0,
        "memory resident of pipeline rank 3": 5_000_000,
        "memory weights of pipeline rank 3 planned": 1000,
        "memory masters of pipeline rank 3 planned": 0,
        "memory states of pipeline rank 3 planned": 7,
    }


def test_memory_has_tags_in_tensorboard(tmp_path: Path) -> None:
    writer = TensorBoard(str(tmp_path), LoggingConfig(), 0)
    sizes = {"weights": 12}
    writer.memory(
        {"iteration": 3, "pipeline_rank": 0, "measured_bytes": sizes, "planned_bytes": sizes}
    )
    writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    for tag in ("memory weights of pipeline rank 0", "memory weights of pipeline rank 0 planned"):
        (point,) = events.Scalars(tag)
        assert (point.step, point.value) == (3, 12)


def test_timers_block() -> None:
    by_rank = {"optimizer": [0.2, 0.4]}
    assert timers_block(by_rank, "minmax", 2).splitlines() == [
        "(min, max) time across ranks (ms):",
        "    optimizer ......................................: (100.00, 200.00)",
    ]
    assert timers_block(by_rank, "max", 1).splitlines()[1].endswith(".: 400.00")
    assert timers_block(by_rank, "all", 1).splitlines() == [
        "times across ranks (ms):",
        "  optimizer:",
        "     rank  0: 200.00",
        "     rank  1: 400.00",
    ]


def test_timers_without_time_are_not_shown() -> None:
    idle = {"send": [0.0, 0.0]}
    for style in ("max", "minmax", "all"):
        assert timers_block({}, style, 1) == timers_block(idle, style, 1) == ""
    some = timers_block(idle | {"wait": [0.0, 0.5]}, "all", 1)
    assert some.splitlines()[1:] == ["  wait:", "     rank  1: 500.00"]


def test_timers_above_the_level_measure_nothing() -> None:
    waits: list[int] = []
    timers = Timers(1, lambda: waits.append(1))
    with timers.measure("part", level=2):
        pass
    assert not waits and not timers.take()
    with timers.measure("phase"), timers.measure("phase"):
        pass
    assert list(timers.take()) == ["phase"] and len(waits) == 4
    assert not timers.take()


def test_tensorboard_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match="--tensorboard-dir .* tensorboard"):
        TensorBoard(str(tmp_path), LoggingConfig(), 0)


class FakeWandb:
    """What the W&B package is asked to do."""

    def __init__(self) -> None:
        self.inits: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.id = "run7"

    def init(self, **settings: Any) -> "FakeWandb":
        self.inits.append(settings)
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None: ...


def test_a_resume_continues_the_same_wandb_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = FakeWandb()
    module = types.ModuleType("wandb")
    module.init = fake.init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    config = LoggingConfig(wandb_project="p", wandb_exp_name="e")
    for number in (1, 2):
        writers: list[Writer] = [Wandb(config, str(tmp_path), {"lr": 1.0})]
        metrics = Metrics(facts(), writers, lambda line: None)
        metrics.add(iteration(number))
        metrics.close()
    assert [one["id"] for one in fake.inits] == [None, "run7"]
    assert all(one["resume"] == "allow" for one in fake.inits)
    step, values = fake.logged[0]
    assert step == 1 and {"lm loss", "learning-rate", "batch-size", "grad-norm"} <= values.keys()


def test_wandb_asks_for_a_name_and_its_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="wandb package"):
        Wandb(LoggingConfig(wandb_project="p", wandb_exp_name="e"), str(tmp_path), {})
    monkeypatch.setitem(sys.modules, "wandb", types.ModuleType("wandb"))
    with pytest.raises(UserError, match="--wandb-exp-name"):
        Wandb(LoggingConfig(wandb_project="p"), str(tmp_path), {})


def test_iterations_left_out_by_request_do_not_enter_rates(tmp_path: Path) -> None:
    path, lines = tmp_path / "metrics.jsonl", list[str]()
    metrics = Metrics(
        facts(peak_flops=40e12), [JsonLines(str(path))], lines.append, show_throughput=True
    )
    nothing = {"skipped": True, "left_out": True, "elapsed_ms": 0.1, "grad_norm": None}
    metrics.add(iteration(1, **nothing))
    metrics.add(iteration(2, elapsed_ms=10_000.0))
    metrics.add(iteration(3, **nothing))
    metrics.add(iteration(4, elapsed_ms=100.0))
    metrics.print_line(NOW)
    # Of the computed iterations the first warms up; 4 samples of 8 tokens in 0.1 s; 96 x 0.1 s.
    assert "throughput per GPU (TFLOP/s/GPU): 20.0 |" in lines[0]
    assert "tokens per second: 320 |" in lines[0] and "ETA: 0:00:10 |" in lines[0]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["tokens_per_second"] for row in rows] == [None, 3.2, None, 320.0]
    assert [row["mfu"] for row in rows] == [None, 0.005, None, 0.5]
    metrics.add(iteration(5, **nothing))
    metrics.print_line(NOW)
    assert "tokens per second" not in lines[1] and "throughput" not in lines[1]
