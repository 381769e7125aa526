"""Our GPT with Megatron-core's weights gives Megatron-core's logits and gradients.

The cases under ``tests/data/mcore_trajectories`` were made with Megatron-core 0.19.2 in fp32:
initial weights, batches, logits of the first microbatch, and every gradient of the first iteration
before clipping.
"""

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.core.config import specs
from megatron.core.mesh import Mesh
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.optimizer import build_optimizer
from megatron.core.precision.config import PrecisionConfig
from megatron.core.transformer.config import TransformerConfig
from megatron.training.config import HealthConfig
from megatron.training.health import Health
from megatron.training.objective import Objective
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
        torch.testing.assert_close(grads[ours(key)], want, rtol=2e-5, atol=2e-6, msg=key)


@pytest.mark.parametrize("name", CASES)
def test_seven_iterations(name: str) -> None:
    """Loss and gradient norm of every iteration, through our objective and optimizer."""
    model, batches, case = load_case(name, torch.float32)
    mesh = model.mesh
    settings = OptimizerConfig.resolve(
        adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-5, weight_decay=0.1, clip_grad=1.0
    )
    optimizer = build_optimizer(settings, [model], mesh, PrecisionConfig.resolve())
    objective = Objective("--calculate-per-token-loss" in case["flags"], mesh)
    step = TrainStep(
        model,
        optimizer,
        forward_step,
        objective,
        Health(HealthConfig.resolve()),
        Timers(0),
        seed=0,
    )
    records = [*case["iterations"], *case["after_checkpoint"]]
    for index, record in enumerate(records):
        plan = Plan(iteration=index + 1, samples=range(4), learning_rate=5e-3, weight_decay=0.1)
        microbatches = [
            {key: batches[key][index, number] for key in ("tokens", "labels", "loss_mask")}
            for number in range(2)
        ]
        nominal = objective.nominal(4, 2, 32)
        result = step.run(plan, microbatches, nominal, lambda: (False, False, False))
        reported = result.totals.loss
        if not objective.per_token:
            # The reference reports the mean over tokens in both modes; masks are full here.
            assert all(float(batch["loss_mask"].min()) == 1.0 for batch in microbatches)
        assert reported == pytest.approx(record["lm_loss"], rel=1e-5)
        assert float(result.grad_norm) == pytest.approx(record["grad_norm"], rel=2e-5)
        if record["iteration"] == 5:
            for key, norm in case["final_weight_l2"].items():
                weight = dict(model.named_parameters())[ours(key)].detach()
                assert float(weight.norm()) == pytest.approx(norm, rel=1e-5), key
