"""A run's checkpoints: resume bit for bit, each part on its own, every source told apart."""

import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megatron.core import sharding
from megatron.core.dist_checkpointing import catalog, format, save
from megatron.core.dist_checkpointing.format import CheckpointError
from megatron.core.dist_checkpointing.reader import Checkpoint, DamagedError
from megatron.core.mesh import Mesh
from megatron.core.optimizer.config import OptimizerConfig, ScheduleConfig
from megatron.core.optimizer.optimizer import Optimizer, build_optimizer
from megatron.core.optimizer.schedule import Progress, Schedule, build_schedule
from megatron.core.precision.config import PrecisionConfig
from megatron.core.sharding import Init, Region, Sharding, whole
from megatron.core.utils import UserError
from megatron.training.checkpoint_config import CheckpointConfig
from megatron.training.checkpoints import load as checkpoint_load
from megatron.training.checkpoints import random_states
from megatron.training.checkpoints import save as checkpoint_save
from megatron.training.checkpoints import source as checkpoint_source
from megatron.training.checkpoints.facts import RunFacts, check_rule
from megatron.training.checkpoints.load import Loaded
from megatron.training.state import TrainState

MESH = Mesh.serial()
FP32, FP64, BF16, FP16 = (
    PrecisionConfig.resolve(),
    PrecisionConfig.resolve(fp64=True),
    PrecisionConfig.resolve(bf16=True),
    PrecisionConfig.resolve(fp16=True),
)
SCALED = PrecisionConfig.resolve(
    use_precision_aware_optimizer=True, exp_avg_dtype="fp16", exp_avg_sq_dtype="fp16"
)
NORMAL = Init("normal", 0.5)


class Toy(nn.Module):
    """A padded table, a matrix and a vector: a shape of each kind."""

    def __init__(self, precision: PrecisionConfig, seed: int, rows: int = 8) -> None:
        super().__init__()
        dtype = getattr(torch, precision.params_dtype)
        box = ((0, 5), (0, 3))
        self.table = self._make(Sharding((5, 3), (Region(box, box),), NORMAL), (rows, 3), dtype)
        self.matrix = self._make(whole((4, 3), NORMAL, matrix=True), (4, 3), dtype)
        self.bias = self._make(whole((4,), NORMAL, decay=False), (4,), dtype)
        sharding.name_parameters(self)
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw))
            self.table[5:] = 0

    @staticmethod
    def _make(record: Sharding, shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
        return sharding.attach(nn.Parameter(torch.empty(shape, dtype=dtype)), record)


class Run:
    """A toy run: its gradients depend on the iteration alone."""

    def __init__(
        self, folder: Path, precision: PrecisionConfig = FP32, seed: int = 1, **config: Any
    ) -> None:
        rows = config.pop("rows", 8)
        rule = config.pop("optimizer", "adam")
        schedule_flags = {
            name: config.pop(name) for name in list(config) if name.endswith("param_scheduler")
        }
        self.lr = config.pop("lr", 0.1)
        self.model = Toy(precision, seed, rows)
        self.optimizer: Optimizer = build_optimizer(
            OptimizerConfig(optimizer=rule), [self.model], MESH, precision
        )
        self.schedule_config = ScheduleConfig(lr=self.lr, lr_warmup_iters=3, **schedule_flags)
        self.schedule = build_schedule(self.schedule_config, 0.01, train_iters=10)
        self.config = CheckpointConfig(**{"save": str(folder), "load": str(folder), **config})
        self.state, self.lines = TrainState(), []
        self.loaded: Loaded | None = None
        self.extra: dict[str, Any] = {}

    @property
    def facts(self) -> RunFacts:
        return RunFacts(
            config={"lr": self.lr, "split": (9, 1), **self.extra},
            schedule=self.schedule,
            tokenizer="abc",
            vocabulary=5,
            vocabulary_rows=5,
            objective="tokens",
        )

    def train(self, until: int) -> "Run":
        while self.state.iteration < until:
            draw = torch.Generator().manual_seed(100 + self.state.iteration)
            self.optimizer.zero_grad()
            for parameter in self.model.parameters():
                grad = torch.randn(parameter.shape, generator=draw)
                parameter.grad.copy_(grad)
            self.model.table.grad[5:] = 0
            rate = self.schedule.learning_rate(Progress(self.state.iteration + 1, 0))
            self.optimizer.step(1.0, lr=rate, weight_decay=0.01)
            self.state.iteration += 1
            self.state.consumed_samples += 4
        return self

    def save(self) -> checkpoint_save.Saved:
        return checkpoint_save.save_checkpoint(
            self.config,
            MESH,
            [self.model],
            self.optimizer,
            self.state,
            self.facts,
            self.lines.append,
        )

    def load(self) -> "Run":
        self.loaded = checkpoint_load.load_checkpoint(
            self.config,
            self.schedule_config,
            MESH,
            [self.model],
            self.optimizer,
            self.facts,
            self.lines.append,
        )
        self.state, self.schedule = self.loaded.state, self.loaded.schedule
        return self

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def states(self) -> dict[str, Tensor]:
        return {state.key: state.values().clone() for state in self.optimizer.tensors()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


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


# LR-04: each part on its own, and reported

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


# Another precision, another padding


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


# Which checkpoint


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
    (tmp_path / f"iter_0000010{save.PARTIAL}").mkdir()
    run = Run(tmp_path).load()
    assert run.state.iteration == 0 and "never finished" in run.text


@pytest.mark.parametrize(
    "make",
    [
        lambda root: (root / catalog.TRACKER).write_text("10"),
        lambda root: (root / catalog.TRACKER).write_text("release"),
        lambda root: (root / "iter_0000010").mkdir(),
        lambda root: os.truncate(root / "iter_0000002" / "rank00000.bin", 10),
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
    with pytest.raises(UserError, match=r"--ckpt-step \(3\).*complete ones: 2, 4"):
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


# Strictness and integrity, from the flags


def drop(folder: Path, key: str) -> None:
    """Take one tensor out of a checkpoint's index."""
    index = format.read_index(folder)
    del index.tensors[key]
    format.write_index(index, folder / format.INDEX)


def test_ckpt_12_a_missing_weight_stops_the_run(tmp_path: Path) -> None:
    Run(tmp_path).train(2).save()
    drop(tmp_path / "iter_0000002", "model.matrix")
    run = Run(tmp_path, seed=9)
    before = run.weights()
    with pytest.raises(CheckpointError, match="1 tensor.s. missing:\n  model.matrix"):
        run.load()
    assert equal(before, run.weights())
    run = Run(tmp_path, seed=9, dist_ckpt_strictness="log_all").load()
    assert "WARNING: 1 missing tensors: model.matrix" in run.text
    assert torch.equal(run.weights()["matrix"], before["matrix"])


def test_ckpt_13_a_stray_tensor_stops_the_run(tmp_path: Path) -> None:
    Run(tmp_path).train(2).save()
    folder = tmp_path / "iter_0000002"
    index = format.read_index(folder)
    index.tensors["model.stray"] = replace(index.tensors["model.bias"])
    format.write_index(index, folder / format.INDEX)
    with pytest.raises(CheckpointError, match="1 tensor.s. unexpected:\n  model.stray"):
        Run(tmp_path).load()
    run = Run(tmp_path, dist_ckpt_strictness="log_unexpected").load()
    assert "WARNING: 1 unexpected tensors: model.stray" in run.text


def test_another_optimizer_is_refused_with_the_flag_that_helps(tmp_path: Path) -> None:
    Run(tmp_path).train(2).save()
    with pytest.raises(CheckpointError, match=r"(?s)optimizer\.momentum.*--no-load-optim"):
        Run(tmp_path, optimizer="sgd").load()


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (
            {"optimizer": "adam"},
            {"optimizer": "lion"},
            "--optimizer adam, this run has --optimizer",
        ),
        (
            {"optimizer": "muon", "muon_scalar_optimizer": "adam"},
            {"optimizer": "muon", "muon_scalar_optimizer": "lion"},
            "--muon-scalar-optimizer adam, or --no-load-optim",
        ),
    ],
)
def test_states_of_another_rule_are_refused_by_its_name(
    before: dict[str, str], now: dict[str, str], said: str
) -> None:
    run = RunFacts(
        config=now, schedule=None, tokenizer="", vocabulary=5, vocabulary_rows=5, objective="tokens"
    )
    with pytest.raises(UserError, match=said):
        check_rule({"config": before}, run, Path("save"))
    check_rule({"config": now}, run, Path("save"))
    check_rule({}, run, Path("save"))  # of another program


def test_verify_integrity_finds_a_flipped_bit(tmp_path: Path) -> None:
    Run(tmp_path).train(2).save()
    path = tmp_path / "iter_0000002" / "rank00000.bin"
    data = bytearray(path.read_bytes())
    data[3] ^= 64
    path.write_bytes(data)
    Run(tmp_path, verify_integrity=False).load()
    with pytest.raises(DamagedError, match=r"(?s)is damaged.*model\.table.*--ckpt-step"):
        Run(tmp_path).load()


def test_a_load_logs_where_from_and_the_hash_of_the_content(tmp_path: Path) -> None:
    saved = Run(tmp_path).train(2)
    saved.save()
    stored = json.loads((tmp_path / "iter_0000002" / format.INDEX).read_text())["hash"]
    run = Run(tmp_path).load()
    assert run.loaded.hash == stored and f"hash {stored}" in run.text
    assert f"hash {stored}" in saved.text
    assert f"successfully loaded checkpoint from {tmp_path} at iteration 2" in run.text


# Schedules


def test_another_schedule_needs_a_word_and_shows_both_curves(tmp_path: Path) -> None:
    Run(tmp_path).train(5).save()
    with pytest.raises(UserError, match=r"lr: 0\.1 -> 0\.2.*--override-opt_param-scheduler"):
        Run(tmp_path, lr=0.2).load()
    for flag, rate in (
        ("override_opt_param_scheduler", 0.2),
        ("use_checkpoint_opt_param_scheduler", 0.1),
    ):
        run = Run(tmp_path, lr=0.2, **{flag: True}).load()
        assert isinstance(run.schedule, Schedule) and run.schedule.lr == rate
        # Iterations 0, 2, 5, 8 and 10, with the old rate and the new one.
        rows = [line for line in run.lines if line.strip()[:1].isdigit()]
        assert len(rows) == 5 and "1.333333e-01" in rows[1] and "6.666667e-02" in rows[1]
    assert Run(tmp_path, lr=0.2, finetune=True).load().schedule.lr == 0.2


@pytest.mark.parametrize(("before", "now", "what"), [(None, 0.3, "drop"), (0.3, None, "give")])
def test_a_stored_schedule_cannot_bring_or_take_away_a_decoupled_rate(
    tmp_path: Path, before: float | None, now: float | None, what: str
) -> None:
    """How parameters are grouped follows from the flags, so the rate would be lost or made up."""
    saved, other = Run(tmp_path), Run(tmp_path, use_checkpoint_opt_param_scheduler=True)
    saved.schedule = replace(saved.schedule, decoupled_lr=before, decoupled_min_lr=0.0)
    saved.train(2).save()
    other.schedule = replace(other.schedule, decoupled_lr=now, decoupled_min_lr=0.0)
    with pytest.raises(UserError, match=f"{what} --decoupled-lr"):
        other.load()


def test_other_shapes_are_said_before_another_schedule(tmp_path: Path) -> None:
    Run(tmp_path).train(2).save()
    run = Run(tmp_path, lr=0.2)
    record = whole((5, 3), NORMAL, matrix=True)
    run.model.matrix = run.model._make(record, (5, 3), torch.float32)
    sharding.name_parameters(run.model)
    with pytest.raises(UserError, match=r"matrix: float32 \[4, 3\], here float32 \[5, 3\]"):
        run.load()


def test_what_differs_from_the_checkpoint_is_said(tmp_path: Path) -> None:
    Run(tmp_path).train(2).save()
    same = Run(tmp_path).load()
    assert "settings that differ" not in same.text and "WARNING" not in same.text
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        run = Run(tmp_path, lr=0.2, override_opt_param_scheduler=True).load()
    finally:
        torch.set_num_threads(threads)
    assert f"threads {threads} -> {threads + 1}" in run.text
    assert "settings that differ from the checkpoint's: lr 0.1 -> 0.2" in run.lines


def test_settings_that_change_the_order_of_sums_are_warned_of(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.extra = {"ddp_bucket_size": 1000}
    run.train(2).save()
    other = Run(tmp_path)
    other.extra = {"ddp_bucket_size": 2000}
    other.load()
    assert "WARNING: ddp_bucket_size 1000 -> 2000: sums may be rounded in another" in other.text
    assert "settings that differ" not in other.text


# Saving


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
    (tmp_path / f"iter_0000009{save.PARTIAL}").mkdir(parents=True)
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
