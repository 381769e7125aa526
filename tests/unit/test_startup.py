"""What a run says before its first iteration."""

import sys

import pytest
import torch
from torch import nn

from megatron.core.kernels import probe
from megatron.core.transformer.backends import choose_backends
from megatron.core.transformer.config import TransformerConfig
from megatron.training import startup

CONFIG = TransformerConfig.resolve(
    num_layers=1, hidden_size=8, num_attention_heads=2, max_position_embeddings=4
)


class Model(nn.Module):
    """Nothing but the chosen backends."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.backends = choose_backends(CONFIG, device, dtype)


def lines(device: str, dtype: torch.dtype) -> list[str]:
    where = torch.device(device)
    return startup.kernel_lines(Model(where, dtype), where, dtype)


def test_the_kernels_of_a_run_are_named_once() -> None:
    (line,) = lines("cpu", torch.float32)
    assert line.startswith("kernels: attention: blocked, layer_norm: torch, ")


def test_a_package_that_is_passed_over_is_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for package in ("flash_attn", "triton"):
        monkeypatch.setitem(sys.modules, package, None)  # importing it fails
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    probe.missing.cache_clear()
    first, flash, triton = lines("cuda", torch.bfloat16)
    assert first.startswith("kernels: attention: sdpa, ")
    assert flash.startswith("  attention without flash_attn: ") and "pip install" in flash
    # One line for all ops.
    assert triton.startswith("  layer_norm, rms_norm, rope, ") and "pip install triton" in triton
    probe.missing.cache_clear()


def test_a_model_without_a_choice_says_nothing() -> None:
    device = torch.device("cpu")
    assert startup.kernel_lines(nn.Linear(1, 1), device, torch.float32) == []
