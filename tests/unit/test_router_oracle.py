"""Our routers on Megatron-core's weights and tokens find Megatron-core's losses and biases.

``tests/data/mcore_routers`` holds the weights before a router, and the tokens of two microbatches,
of two models made with Megatron-core 0.19.2 in fp32. What it reported in its first iteration stands
below; the layers before the router are written out here.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.mesh import Mesh
from megatron.core.rng import DropoutKey
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.context import Context
from megatron.core.transformer.moe.router import Router, update_expert_biases

DATA = Path(__file__).parent.parent / "data" / "mcore_routers"
F64 = torch.float64
HIDDEN, HEADS, GROUPS = 32, 4, 2
LOAD_BALANCING_LOSS, Z_LOSS = 1.0559942722320557, 7.4541015625
BIASES = (
    *(-0.02571176551282406, 0.02118847519159317, 0.015378674492239952, 0.028843147680163383),
    *(-0.021952126175165176, 0.021023141220211983, -0.015613471157848835, 0.008655787445604801),
)


def normed(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain


def turned(x_SBnD: Tensor) -> Tensor:
    size = x_SBnD.shape[-1]
    rates = 10000.0 ** (-torch.arange(0, size, 2, dtype=F64) / size)
    angles = torch.outer(torch.arange(len(x_SBnD), dtype=F64), rates)[:, None, None]
    a, b = x_SBnD.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def attended(x_SBH: Tensor, weights: dict[str, Tensor], layer: int) -> Tensor:
    """Return ``x + attention(norm(x))``: rows per group are its query heads, a key and a value."""
    name = f"decoder.layers.{layer}"
    size = HIDDEN // HEADS
    mixed = normed(x_SBH, weights[f"{name}.input_layernorm.weight"])
    mixed = mixed @ weights[f"{name}.self_attention.linear_qkv.weight"].t()
    q, k, v = mixed.unflatten(-1, (GROUPS, -1)).split((HEADS // GROUPS * size, size, size), -1)
    q, k = turned(q.reshape(*x_SBH.shape[:2], HEADS, size)), turned(k)
    k, v = (x.repeat_interleave(HEADS // GROUPS, 2) for x in (k, v))
    score = torch.einsum("sbnd,tbnd->bnst", q, k) / size**0.5
    visible = torch.ones(len(x_SBH), len(x_SBH), dtype=torch.bool).tril()
    share = score.masked_fill(~visible, -torch.inf).softmax(-1)
    y_SBH = torch.einsum("bnst,tbnd->sbnd", share, v).flatten(2)
    return x_SBH + y_SBH @ weights[f"{name}.self_attention.linear_proj.weight"].t()


def through_mlp(x_SBH: Tensor, weights: dict[str, Tensor], layer: int) -> Tensor:
    name = f"decoder.layers.{layer}"
    h = normed(x_SBH, weights[f"{name}.pre_mlp_layernorm.weight"])
    gate, up = (h @ weights[f"{name}.mlp.linear_fc1.weight"].t()).chunk(2, -1)
    return x_SBH + (F.silu(gate) * up) @ weights[f"{name}.mlp.linear_fc2.weight"].t()


def router_inputs(case: str, layer: int) -> tuple[Router, list[Tensor]]:
    """Return the router of a layer, and its input for each microbatch, x_SBH."""
    stored = np.load(DATA / f"{case}.npz")
    weights = {name: torch.from_numpy(stored[name]) for name in stored}
    weights = {name: x.to(F64) if x.is_floating_point() else x for name, x in weights.items()}
    inputs = []
    for tokens_BS in weights.pop("tokens"):
        x_SBH = weights["embedding.word_embeddings.weight"][tokens_BS.t()]
        for number in range(layer):
            x_SBH = through_mlp(attended(x_SBH, weights, number), weights, number)
        x_SBH = attended(x_SBH, weights, layer)
        inputs.append(normed(x_SBH, weights[f"decoder.layers.{layer}.pre_mlp_layernorm.weight"]))
    choices: dict[str, dict[str, object]] = {
        "moe_softmax": {"moe_aux_loss_coeff": (1e-2,), "moe_z_loss_coeff": 1e-3},
        "moe_sigmoid": {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 1e-2,
            "moe_router_num_groups": 4,
            "moe_router_group_topk": 2,
            "moe_router_topk_scaling_factor": 2.5,
            "moe_router_load_balancing_type": ("none",),
        },
    }
    config = TransformerConfig.resolve(
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        max_position_embeddings=32,
        **choices[case],
    )
    name = f"decoder.layers.{layer}.mlp.router"
    experts = len(weights[f"{name}.weight"])
    router = Router(config, layer, Mesh.serial(), F64, num_experts=experts)
    with torch.no_grad():
        router.weight.copy_(weights[f"{name}.weight"])
        if router.expert_bias is not None:
            router.expert_bias.copy_(weights[f"{name}.expert_bias"])
    return router, inputs


def test_losses_are_those_of_megatron_core() -> None:
    router, inputs = router_inputs("moe_softmax", 0)
    found = [
        router(x_SBH.reshape(-1, HIDDEN), Context(), tuple(x_SBH.shape[:2])).losses
        for x_SBH in inputs
    ]
    for name, value in (("load_balancing_loss", LOAD_BALANCING_LOSS), ("z_loss", Z_LOSS)):
        mean = torch.stack([losses[name] for losses in found]).mean()
        assert float(mean.detach()) == pytest.approx(value, rel=1e-6)


def test_biases_are_those_of_megatron_core() -> None:
    router, inputs = router_inputs("moe_sigmoid", 1)
    key = DropoutKey(1, 1, 0)
    for number, x_SBH in enumerate(inputs):
        context = Context(dropout=replace(key, microbatch=number))
        routing = router(x_SBH.reshape(-1, HIDDEN), context, tuple(x_SBH.shape[:2]))
        # By the text: scores without the bias over their sum, times the factor.
        logits_TE = x_SBH.reshape(-1, HIDDEN) @ router.weight.detach().t()
        scores_TK = torch.sigmoid(logits_TE).gather(1, routing.experts_TK)
        weights_TK = 2.5 * scores_TK / (scores_TK.sum(1, keepdim=True) + 1e-20)
        torch.testing.assert_close(routing.weights_TK.detach(), weights_TK)
    update_expert_biases([router])
    assert router.expert_bias.tolist() == pytest.approx(BIASES, rel=1e-6)
