"""A model on Triton's kernels, interpreted, against the same model on torch's operations."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core import rng
from megatron.core.kernels import table
from megatron.core.mesh import Mesh
from megatron.core.models.gpt import GPTModel
from megatron.core.rng import DropoutKey
from megatron.core.transformer.config import TransformerConfig
from tests.kernels import needs

pytestmark = needs.INTERPRETED

VOCAB, PADDED, LENGTH = 21, 24, 6
ALWAYS: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 12,
    "num_attention_heads": 2,
    "max_position_embeddings": LENGTH,
    "attention_dropout": 0.0,
    "init_method_std": 0.3,
    "cross_entropy_loss_fusion": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "GPT-3's": {"attention_backend": "unfused"},
    "Llama's": {
        "normalization": "RMSNorm",
        "apply_layernorm_1p": True,
        "position_embedding_type": "rope",
        "swiglu": True,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "group_query_attention": True,
        "qk_layernorm": True,
    },
    "Mixtral's": {
        "num_experts": 4,
        "moe_permute_fusion": True,
        "moe_router_fusion": True,
        "moe_aux_loss_coeff": (0.1,),
        "swiglu": True,
        "add_bias_linear": False,
    },
    "recomputed": {
        "position_embedding_type": "rope",
        "rotary_interleaved": True,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


def run(settings: dict[str, Any], dropout: float) -> tuple[dict[str, str], list[Tensor]]:
    """Return the backends, and the losses and gradients of a step."""
    config = TransformerConfig.resolve(**ALWAYS, **settings, hidden_dropout=dropout)
    model = GPTModel(config, Mesh.serial(), vocab_size=VOCAB, padded_vocab_size=PADDED)
    rng.initialize(model, 3)
    text = torch.randint(0, VOCAB, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    losses = model(text[:, :-1], text[:, 1:], dropout=DropoutKey(1, 1, 0))
    losses.square().sum().backward()
    grads = [parameter.grad for parameter in model.parameters()]
    return model.backends.names, [losses.detach(), *(grad for grad in grads if grad is not None)]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", MODELS)
def test_a_step_is_the_same(kind: str, dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    names, ours = run(MODELS[kind], dropout)
    names.pop("grouped_products", None)  # torch's, or a loop
    assert {names.pop("attention"), *names.values()} <= {"triton", "triton_softmax", "blocked"}
    monkeypatch.delenv("TRITON_INTERPRET")
    # The masks that Triton counts out are those of the reference, not of torch's generator.
    reference = table.TABLE["bias_dropout_add"]["reference"]
    monkeypatch.setitem(table.TABLE["bias_dropout_add"], "torch", reference)
    names, theirs = run(MODELS[kind], dropout)
    assert "triton" not in names.values()
    assert len(ours) == len(theirs)
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * want.abs().max().item())
