"""What a resumed run takes over: bit for bit, each part alone, another precision or padding."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.core import progress
from megatron.core.dist_checkpointing import format
from megatron.core.dist_checkpointing.format import CheckpointError
from megatron.core.dist_checkpointing.reader import Checkpoint
from megatron.core.optimizer.schedule import Progress
from megatron.core.precision.config import PrecisionConfig
from megatron.training.checkpoints import random_states
from megatron.training.state import TrainState
from tests.unit.checkpoint_runs import BF16, FP16, FP32, FP64, MESH, SCALED, Run, equal


@pytest.mark.parametrize(
    "precision",
    [FP32, FP64, BF16, FP16, SCALED],
    ids=["fp32", "fp64", "bf16", "fp16", "moments with scales"],
)
@pytest.mark.parametrize("rule", ["adam", "sgd"])
def test_a_resumed_run_equals_the_uninterrupted_one(
    tmp_path: Path, precision: PrecisionConfig, rule: str
) -> None:
    straight = Run(tmp_path, precision, optimizer=rule).train(8)
    Run(tmp_path, precision, optimizer=rule).train(5).save()
    resumed = Run(tmp_path, precision, seed=99, optimizer=rule).load()
    assert resumed.state == TrainState(iteration=5, consumed_samples=20)
    resumed.train(8)
    assert equal(straight.weights(), resumed.weights())
    assert equal(straight.states(), resumed.states())
    assert straight.optimizer.scalars() == resumed.optimizer.scalars()


def test_moments_with_scales_are_stored_as_fp32_numbers(tmp_path: Path) -> None:
    """Exactly: a run with fp32 moments has the same, and so has one that goes back from there."""
    saved = Run(tmp_path, SCALED).train(5)
    saved.save()
    with Checkpoint(tmp_path / "iter_0000005") as checkpoint:
        kinds = {key.split(".")[1] for key in checkpoint.index.tensors if "optimizer" in key}
        assert kinds == {"exp_avg", "exp_avg_sq"}
        assert {t.dtype for t in checkpoint.index.tensors.values()} <= {"float32", "uint8"}
    fine = Run(tmp_path, FP32, seed=9).load()
    assert equal(fine.states(), saved.states())
    fine.save()
    again = Run(tmp_path, SCALED, seed=7).train(2).load()  # whatever was there is replaced
    assert equal(again.states(), saved.states())
    for run in (saved, again):
        run.train(7)
    assert equal(again.weights(), saved.weights()) and equal(again.states(), saved.states())


def test_moments_are_rounded_when_a_run_with_scales_takes_them_over(tmp_path: Path) -> None:
    saved = Run(tmp_path, FP32).train(5)
    saved.save()
    taken = Run(tmp_path, SCALED, seed=9).load().states()
    for key, expected in saved.states().items():
        assert not torch.equal(taken[key], expected)
        torch.testing.assert_close(taken[key], expected, rtol=2**-11, atol=0)


@pytest.mark.parametrize("precision", [FP32, SCALED], ids=["fp32", "moments with scales"])
def test_lr_03_loading_twice_is_loading_once(tmp_path: Path, precision: PrecisionConfig) -> None:
    Run(tmp_path, precision).train(5).save()
    once, twice = Run(tmp_path, precision).load(), Run(tmp_path, precision).load().load()
    assert twice.state == once.state == TrainState(iteration=5, consumed_samples=20)
    assert twice.optimizer.scalars() == {"step": 5}
    assert equal(once.states(), twice.states())


ALL = ("weights", "optimizer", "random", "progress")


@pytest.mark.parametrize(
    ("flags", "parts", "iteration", "step"),
    [
        ({}, ALL, 5, 5),
        ({"load_optim": False}, ("weights", "random", "progress"), 5, 0),
        ({"load_rng": False}, ("weights", "optimizer", "progress"), 5, 5),
        ({"load_optim": False, "load_rng": False}, ("weights", "progress"), 5, 0),
        ({"finetune": True}, ("weights",), 0, 0),
    ],
)
def test_lr_04_each_part_is_chosen_alone_and_reported(
    tmp_path: Path, flags: dict[str, bool], parts: tuple[str, ...], iteration: int, step: int
) -> None:
    saved = Run(tmp_path).train(5)
    saved.save()
    run = Run(tmp_path, seed=9, **flags).load()
    assert run.loaded.parts == parts
    assert (run.state.iteration, run.optimizer.scalars()["step"]) == (iteration, step)
    assert equal(run.weights(), saved.weights())
    zero = all((state == 0).all() for state in run.states().values())
    assert zero == ("optimizer" not in parts)
    line = next(line for line in run.lines if "successfully loaded" in line)
    for part in ALL:
        assert f"{part} {'loaded' if part in parts else 'fresh'}" in line
    # The rate follows from the iteration alone, whether or not the optimizer was loaded.
    rate = run.schedule.learning_rate(Progress(run.state.iteration, 0))
    assert rate == pytest.approx(0.1 * 5 / 7 if iteration else 0.0)


@pytest.mark.parametrize(("flag", "part"), [("save_optim", "optimizer"), ("save_rng", "random")])
def test_what_was_not_saved_is_not_there(tmp_path: Path, flag: str, part: str) -> None:
    Run(tmp_path, BF16, **{flag: False}).train(2).save()
    index = format.read_index(tmp_path / "iter_0000002")
    assert not any(key.startswith(f"{part}.") for key in index.tensors)
    assert any(key.startswith("model.") for key in index.tensors)


def test_a_checkpoint_without_optimizer_names_the_flag_that_helps(tmp_path: Path) -> None:
    saved = Run(tmp_path, BF16, save_optim=False).train(2)
    saved.save()
    with pytest.raises(CheckpointError, match="--no-load-optim"):
        Run(tmp_path, BF16).load()
    run = Run(tmp_path, BF16, seed=9, load_optim=False).load()
    assert equal(run.weights(), saved.weights())
    masters = {k: v for k, v in run.states().items() if ".master." in k}
    assert len(masters) == 3
    assert torch.equal(
        masters["optimizer.master.matrix"], saved.weights()["matrix"].float().reshape(-1)
    )


def test_random_states_come_back() -> None:
    def draw() -> tuple[float, float, float, float]:
        return (random.random(), random.gauss(0, 1), np.random.normal(), torch.rand(()).item())

    draw()
    states = random_states.pack(MESH.device)
    first = [draw() for _ in range(3)]
    random_states.unpack(states, MESH.device)
    assert [draw() for _ in range(3)] == first


def test_random_states_are_loaded_only_if_asked_for(tmp_path: Path) -> None:
    torch.manual_seed(5)
    Run(tmp_path).save()
    expected = torch.rand(4)
    torch.manual_seed(6)
    Run(tmp_path).load()
    assert torch.equal(torch.rand(4), expected)
    torch.manual_seed(6)
    other = torch.rand(4)
    torch.manual_seed(6)
    Run(tmp_path, load_rng=False).load()
    assert torch.equal(torch.rand(4), other)


def test_a_bf16_run_goes_on_in_fp32_from_its_masters(tmp_path: Path) -> None:
    saved = Run(tmp_path, BF16).train(4)
    saved.save()
    run = Run(tmp_path, FP32, seed=9).load()
    masters = saved.states()["optimizer.master.matrix"]
    assert torch.equal(run.weights()["matrix"].reshape(-1), masters)
    assert not torch.equal(masters, masters.bfloat16().float())
    key = "optimizer.exp_avg.matrix"
    assert torch.equal(run.states()[key], saved.states()[key])
    assert "model.bias from optimizer.master.bias" in run.text or "filled from" in run.text


def test_an_fp32_run_goes_on_in_bf16_with_exact_masters(tmp_path: Path) -> None:
    saved = Run(tmp_path, FP32).train(4)
    saved.save()
    run = Run(tmp_path, BF16, seed=9).load()
    exact = saved.weights()["matrix"]
    assert torch.equal(run.states()["optimizer.master.matrix"], exact.reshape(-1))
    assert torch.equal(run.weights()["matrix"], exact.bfloat16())
    assert "converted 3 tensors from float32 to bfloat16" in run.text


def test_a_run_goes_on_in_fp16_and_back(tmp_path: Path) -> None:
    """Masters are exact, and the loss scale starts as the flags say, where none was stored."""
    saved = Run(tmp_path, BF16).train(4)
    saved.save()
    half = Run(tmp_path, FP16, seed=9).load()
    masters = half.states()["optimizer.master.matrix"]
    assert torch.equal(masters, saved.states()["optimizer.master.matrix"])
    assert half.optimizer.scaler.scale == 2.0**32
    for _ in range(3):
        half.optimizer.scaler.update(overflow=True)
    half.train(6).save()
    again = Run(tmp_path, FP16, seed=9).load()
    assert again.optimizer.scaler.state() == half.optimizer.scaler.state()
    assert again.optimizer.scaler.scale == 2.0**30
    whole = Run(tmp_path, FP32, seed=9).load()
    masters = half.states()["optimizer.master.matrix"]
    assert torch.equal(whole.weights()["matrix"].reshape(-1), masters)
    assert whole.optimizer.scaler.scale == 1


def test_ckpt_08_a_run_with_another_padding_goes_on_the_same(tmp_path: Path) -> None:
    saved = Run(tmp_path, rows=5).train(4)
    saved.save()
    run = Run(tmp_path, rows=128, seed=9).load()
    run.model.table.data[5:] = 0
    assert torch.equal(run.weights()["table"][:5], saved.weights()["table"])
    key = "optimizer.exp_avg_sq.table"
    assert torch.equal(run.states()[key][:15], saved.states()[key])
    index = format.read_index(tmp_path / "iter_0000004")
    assert index.tensors["model.table"].shape == (5, 3)


def test_a_long_load_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Run(tmp_path).train(2).save()
    Run(tmp_path).load()
    assert capsys.readouterr().err == "", "a short one says nothing"
    monkeypatch.setattr(progress, "QUIET", -1.0)
    monkeypatch.setattr(progress, "PAUSE", {False: -1.0})
    Run(tmp_path).load()
    told = capsys.readouterr().err
    assert "checked" in told and "loaded" in told and "100.0%" in told
