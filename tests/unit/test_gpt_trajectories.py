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
from megatron.core.transformer.config import TransformerConfig

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
