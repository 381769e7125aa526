"""Head and loss on pieces of the sequence: the same numbers, and never all logits at once."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core import rng
from megatron.core.mesh import Mesh
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.plan import loss_pieces
from tests.live_bytes import Live

VOCAB, LENGTH, SAMPLES = 50, 13, 2


def model_of(limit: int, **more: Any) -> GPTModel:
    config = TransformerConfig.resolve(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=0.3,
        logits_at_once=limit,
        **more,
    )
    model = GPTModel(config, Mesh.serial(), vocab_size=VOCAB, dtype=torch.float64)
    rng.initialize(model, 3)
    return model


def run(model: GPTModel, with_buffers: bool) -> tuple[Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(VOCAB, (SAMPLES, LENGTH + 1), generator=generator)
    if with_buffers:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    losses = model(text[:, :-1], text[:, 1:])
    weights = torch.linspace(0.0, 2.0, losses.numel(), dtype=torch.float64).view_as(losses)
    (losses * weights).sum().backward()
    return losses.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("with_buffers", [True, False])
@pytest.mark.parametrize("more", [{}, {"logit_softcap": 3.0, "logit_multiplier": 0.7}])
@pytest.mark.parametrize("limit", [1, 300, 701])
def test_pieces_give_the_losses_and_gradients_of_the_whole(
    limit: int, more: dict[str, Any], with_buffers: bool
) -> None:
    whole, pieces = model_of(0, **more), model_of(limit, **more)
    expected, expected_grads = run(whole, with_buffers)
    losses, grads = run(pieces, with_buffers)
    torch.testing.assert_close(losses, expected, rtol=1e-13, atol=1e-14)
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[name], rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.parametrize(
    ("limit", "count"),
    [(0, 1), (10**9, 1), (16 * 2 * 50, 1), (16 * 2 * 50 - 1, 2), (100, 16), (1, 16)],
)
def test_pieces_have_at_most_so_many_logits(limit: int, count: int) -> None:
    assert loss_pieces(16, 2, 50, limit=limit) == count


def test_memory_does_not_grow_with_the_vocabulary_times_the_sequence() -> None:
    """Of 64 pieces only one has its logits at a time, in forward and in backward."""
    peaks = {}
    for limit in (0, 2**14):
        config = TransformerConfig.resolve(
            num_layers=1,
            hidden_size=8,
            num_attention_heads=1,
            max_position_embeddings=256,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            logits_at_once=limit,
        )
        model = GPTModel(config, Mesh.serial(), vocab_size=4096)
        rng.initialize(model, 3)
        text = torch.zeros(1, 257, dtype=torch.int64)
        with Live() as live:
            model(text[:, :-1], text[:, 1:]).sum().backward()
        peaks[limit] = live.most
    logits = 256 * 4096 * 4
    assert peaks[0] > logits
    assert peaks[2**14] < logits / 4
