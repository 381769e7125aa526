"""Our GPT with Megatron-core's weights gives Megatron-core's logits, gradients and training.

The cases under ``tests/data/mcore_trajectories`` were made with Megatron-core 0.19.2 in fp32:
initial weights, batches, logits of the first microbatch, every gradient of the first iteration
before clipping, losses and gradient norms of five iterations and of two more after a checkpoint.
"""

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.core import rng
from megatron.core.config import specs
from megatron.core.mesh import Mesh
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.config import OptimizerConfig, ScheduleConfig
from megatron.core.optimizer.optimizer import build_optimizer
from megatron.core.precision.config import PrecisionConfig
from megatron.core.transformer.config import TransformerConfig
from megatron.training.checkpoint_facts import RunFacts
from megatron.training.checkpoint_load import load_checkpoint
from megatron.training.checkpoint_save import save_checkpoint
from megatron.training.config import CheckpointConfig, HealthConfig
from megatron.training.health import Health
from megatron.training.objective import Objective
from megatron.training.passes import Passes
from megatron.training.state import TrainState
from megatron.training.step import Plan, TrainStep
from megatron.training.timers import Timers
from pretrain_gpt import forward_step

DATA = Path(__file__).parent.parent / "data" / "mcore_trajectories"
CASES = sorted(path.name for path in DATA.iterdir())


def config_of(flags: str) -> TransformerConfig:
    """Return the architecture that a case's Megatron flags describe."""
    by_flag = {}
    for spec in specs(TransformerConfig).values():
        by_flag[spec.flag] = (spec, True)
        by_flag |= {flag: (spec, value) for flag, value in spec.constants.items()}
        by_flag |= {spec.negative: (spec, False)} if spec.negative else {}
    values: dict[str, object] = {}
    words = shlex.split(flags)
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word in by_flag and word != "--transformer-impl":
            spec, constant = by_flag[word]
            values[spec.name] = constant if following.startswith("--") else spec.convert(following)
    return TransformerConfig.resolve(**values)


def load_case(name: str, dtype: torch.dtype) -> tuple[GPTModel, dict[str, torch.Tensor], dict]:
    case = json.loads((DATA / name / "case.json").read_text())
    model = GPTModel(config_of(case["flags"]), Mesh.serial(), vocab_size=128, dtype=dtype)
    weights = np.load(DATA / name / "init.npz")
    parameters = dict(model.named_parameters())
    renamed = {ours(key): torch.from_numpy(weights[key]) for key in weights}
    assert set(renamed) == set(parameters)
    with torch.no_grad():
        for key, value in renamed.items():
            parameters[key].copy_(value)
    batches = {k: torch.from_numpy(v) for k, v in np.load(DATA / name / "batches.npz").items()}
    return model, batches, case


def ours(key: str) -> str:
    """Return our name of one of Megatron-core's parameters."""
    return key.replace("core_attention.softmax_offset", "softmax_offset")


@pytest.mark.parametrize("name", CASES)
def test_logits(name: str) -> None:
    model, batches, _ = load_case(name, torch.float32)
    with torch.no_grad():
        logits = model(batches["tokens"][0, 0])
    expected = torch.from_numpy(np.load(DATA / name / "logits.npz")["logits"])
    # Both in fp32, whose steps are 1e-7: sums of a few layers in another order.
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_first_gradients_and_losses(name: str) -> None:
    model, batches, case = load_case(name, torch.float32)
    per_token = "--calculate-per-token-loss" in case["flags"]
    for step in range(2):
        mask = batches["loss_mask"][0, step]
        losses = model(batches["tokens"][0, step], batches["labels"][0, step])
        total = (losses * mask).sum()
        expected = case["iterations"][0]["microbatch_loss_sum_or_mean"][step]
        assert total.item() == pytest.approx(expected, rel=1e-5)
        norm = batches["loss_mask"][0].sum() if per_token else mask.sum() * 2
        (total / norm).backward()
    expected_grads = np.load(DATA / name / "grads_iter1.npz")
    grads = {key: parameter.grad for key, parameter in model.named_parameters()}
    for key in expected_grads:
        want = torch.from_numpy(expected_grads[key])
        # fp32 again, over twice as many products; gradients are smaller than logits.
        torch.testing.assert_close(grads[ours(key)], want, rtol=2e-5, atol=2e-6, msg=key)


class Training:
    """A case's model in training, through our objective and optimizer."""

    def __init__(self, name: str) -> None:
        self.model, self.batches, self.case = load_case(name, torch.float32)
        settings = OptimizerConfig.resolve(
            adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-5, weight_decay=0.1, clip_grad=1.0
        )
        mesh = self.model.mesh
        self.optimizer = build_optimizer(settings, [self.model], mesh, PrecisionConfig.resolve())
        self.objective = Objective("--calculate-per-token-loss" in self.case["flags"], mesh)
        passes = Passes([self.model], forward_step, self.objective, Timers(0))
        self.step = TrainStep(passes, self.optimizer, Health(HealthConfig.resolve()), seed=0)

    def iterate(self, record: dict) -> None:
        """Run the iteration of a record, and compare loss and gradient norm with it."""
        number = record["iteration"]
        plan = Plan(iteration=number, samples=range(4), learning_rate=5e-3, weight_decay=0.1)
        microbatches = [
            {key: self.batches[key][number - 1, m] for key in ("tokens", "labels", "loss_mask")}
            for m in range(2)
        ]
        if not self.objective.per_token:
            # The reference reports the mean over tokens in both modes; masks are full here.
            assert all(float(batch["loss_mask"].min()) == 1.0 for batch in microbatches)
        nominal = self.objective.nominal(4, 2, 32)
        result = self.step.run(plan, microbatches, 2, nominal, lambda: (False, False, False))
        assert result.totals.loss == pytest.approx(record["lm_loss"], rel=1e-5)
        assert float(result.grad_norm) == pytest.approx(record["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_five_iterations_and_two_after_a_checkpoint(name: str, tmp_path: Path) -> None:
    """Loss and gradient norm of every iteration, the last two by a model that starts from disk."""
    first = Training(name)
    for record in first.case["iterations"]:
        first.iterate(record)
    assert record["iteration"] == 5
    for key, norm in first.case["final_weight_l2"].items():
        weight = dict(first.model.named_parameters())[ours(key)].detach()
        assert float(weight.norm()) == pytest.approx(norm, rel=1e-5), key
    config = CheckpointConfig(save=str(tmp_path), load=str(tmp_path))
    facts = RunFacts(
        config={},
        schedule=None,
        tokenizer="",
        vocabulary=128,
        vocabulary_rows=128,
        objective="tokens" if first.objective.per_token else "microbatches",
    )
    mesh, state = first.model.mesh, TrainState(iteration=5, consumed_samples=20)
    save_checkpoint(config, mesh, [first.model], first.optimizer, state, facts, print)

    fresh = Training(name)
    rng.initialize(fresh.model, 99)
    loaded = load_checkpoint(
        config, ScheduleConfig(lr=5e-3), mesh, [fresh.model], fresh.optimizer, facts, print
    )
    assert loaded.state == state
    assert [record["iteration"] for record in fresh.case["after_checkpoint"]] == [6, 7]
    for record in fresh.case["after_checkpoint"]:
        fresh.iterate(record)
