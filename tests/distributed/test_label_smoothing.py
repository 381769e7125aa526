"""--label-smoothing from the model's head on, against torch's cross entropy of the same logits."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core import rng
from megatron.core.grid import ParallelConfig
from megatron.core.kernels.cross_entropy import IN_PLACE, REFERENCE
from megatron.core.mesh import Mesh
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.config import TransformerConfig
from tests.harness import Pool

VOCAB, PADDED, LENGTH, SAMPLES = 51, 64, 12, 2


def model_on(world: int, **more: Any) -> GPTModel:
    config = TransformerConfig.resolve(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=0.3,
        untie_embeddings_and_output_weights=True,
        **more,
    )
    mesh = Mesh.create(
        ParallelConfig.resolve(tensor_model_parallel_size=world), torch.device("cpu")
    )
    model = GPTModel(
        config,
        mesh,
        vocab_size=VOCAB,
        padded_vocab_size=PADDED,
        dtype=torch.float64,
        sequence_parallel=world > 1,
    )
    rng.initialize(model, 3)
    return model


def text() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (SAMPLES, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def weighted(losses: Tensor) -> Tensor:
    return losses.flatten() @ torch.linspace(0.5, 2.0, losses.numel(), dtype=torch.float64)


def by_torch(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none", label_smoothing=smoothing
    ).view_as(labels)


def work(rank: int, world: int, pieces: int, kept: str) -> dict[str, Tensor]:
    """Return losses in evaluation and in training, and the head's gradient of the latter."""
    model = model_on(world, label_smoothing=0.2, logits_at_once=pieces)
    assert model.output_layer is not None
    if kept != "what was chosen":
        # Fused kernels keep the logits themselves.
        model.output_layer.loss_kernels = REFERENCE if kept == "logits" else IN_PLACE
    tokens, labels = text()
    evaluated = model.eval()(tokens, labels).detach()
    losses = model.train()(tokens, labels)
    weighted(losses).backward()
    return {"evaluated": evaluated, "trained": losses.detach(), "head": head_gradient(model)}


def head_gradient(model: GPTModel) -> Tensor:
    assert model.output_layer is not None and model.output_layer.weight.grad is not None
    return model.output_layer.weight.grad.clone()


@pytest.mark.parametrize(
    ("world", "pieces", "kept"),
    [
        (1, 0, "exponentials"),
        (1, 300, "exponentials"),
        (2, 0, "exponentials"),
        (2, 300, "exponentials"),
        (1, 0, "what was chosen"),
        (2, 300, "what was chosen"),
        (1, 0, "logits"),
        (2, 0, "logits"),
    ],
)
def test_losses_are_of_smoothed_labels_in_training_alone(
    pool: Pool, world: int, pieces: int, kept: str
) -> None:
    model = model_on(1)
    tokens, labels = text()
    logits = model(tokens)
    expected = by_torch(logits, labels, 0.2)
    weighted(expected).backward()
    want = {"evaluated": by_torch(logits.detach(), labels, 0.0), "trained": expected.detach()}
    assert (want["evaluated"] - want["trained"]).abs().min() > 1e-3
    found = pool.run(world, work, world, pieces, kept)
    for one in found:
        for name, losses in want.items():
            torch.testing.assert_close(one[name], losses, rtol=1e-12, atol=1e-12)
    got = torch.cat([one["head"] for one in found])
    torch.testing.assert_close(got, head_gradient(model), rtol=1e-12, atol=1e-13)
