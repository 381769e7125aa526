"""Our router decides as those of the transformers library: experts, weights and balance."""

import os
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the library reads it

from transformers.models.deepseek_v3.modeling_deepseek_v3 import (  # noqa: E402
    DeepseekV3TopkRouter,
)
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (  # noqa: E402
    DeepseekV4HashRouter,
    DeepseekV4TopKRouter,
)
from transformers.models.mixtral.modeling_mixtral import (  # noqa: E402
    MixtralTopKRouter,
    load_balancing_loss_func,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter  # noqa: E402

from megatron.core.rng import DropoutKey  # noqa: E402
from megatron.core.transformer.context import Context  # noqa: E402
from megatron.core.transformer.moe import hashed  # noqa: E402
from megatron.core.transformer.moe.router import Router  # noqa: E402
from tests.unit.test_router import EXPERTS, HIDDEN, SHAPE, mask, router_of, tokens  # noqa: E402

THEIRS = {
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "hidden_size": HIDDEN,
    "n_group": 4,
    "topk_group": 2,
    "scoring_func": "sqrtsoftplus",
    "vocab_size": 50,
    "routed_scaling_factor": 2.5,
}
BIASED = {"moe_router_enable_expert_bias": True, "moe_router_topk_scaling_factor": 2.5}
ROOT = {"moe_router_score_function": "sqrtsoftplus", **BIASED}
CASES: dict[str, tuple[type[nn.Module], dict[str, object], int, bool]] = {
    "mixtral": (MixtralTopKRouter, {}, 2, True),
    "qwen3": (Qwen3MoeTopKRouter, {}, 4, True),
    "qwen3, not normed": (Qwen3MoeTopKRouter, {"moe_router_pre_softmax": True}, 4, False),
    "deepseek v3": (
        DeepseekV3TopkRouter,
        {
            "moe_router_score_function": "sigmoid",
            "moe_router_num_groups": 4,
            "moe_router_group_topk": 2,
            **BIASED,
        },
        4,
        True,
    ),
    "deepseek v4": (DeepseekV4TopKRouter, ROOT, 3, True),
}


def theirs(cls: type[nn.Module], ours: Router, topk: int, normed: bool) -> nn.Module:
    """Return a router of theirs with our weights and biases."""
    settings = {**THEIRS, "num_experts_per_tok": topk, "norm_topk_prob": normed}
    router = cls(SimpleNamespace(**settings))
    router.weight.data = ours.weight.detach().clone()
    if ours.expert_bias is not None:
        router.e_score_correction_bias = ours.expert_bias.detach().clone()
    return router


def assert_equal_routes(experts_TK: Tensor, weights_TK: Tensor, twin: tuple[Tensor, ...]) -> None:
    """Compare with (logits, weights, experts); they do not sort what they choose."""
    _, found_TK, chosen_TK = twin
    mine, other = experts_TK.argsort(1), chosen_TK.argsort(1)
    assert experts_TK.gather(1, mine).equal(chosen_TK.gather(1, other))
    torch.testing.assert_close(
        weights_TK.gather(1, mine),
        found_TK.gather(1, other).to(weights_TK.dtype),
        rtol=2e-6,
        atol=0,
    )


@pytest.mark.parametrize("name", CASES)
def test_routes_are_those_of_the_library(name: str) -> None:
    cls, choices, topk, normed = CASES[name]
    router = router_of(torch.float32, moe_router_topk=topk, **choices)
    x_TH = tokens().float()
    with torch.no_grad():
        routing = router(x_TH, Context(), SHAPE)
        assert_equal_routes(
            routing.experts_TK, routing.weights_TK, theirs(cls, router, topk, normed)(x_TH)
        )


def test_routes_by_token_id_are_those_of_the_library() -> None:
    router = router_of(torch.float32, moe_router_topk=3, moe_n_hash_layers=1, **ROOT)
    ids_SB = torch.randint(0, 50, SHAPE, generator=torch.Generator().manual_seed(2))
    twin = theirs(DeepseekV4HashRouter, router, 3, True)
    twin.tid2eid = hashed.hashed_experts(torch.arange(50), 0, EXPERTS, 3)
    x_TH = tokens().float()
    with torch.no_grad():
        routing = router(x_TH, Context(tokens_SB=ids_SB), SHAPE)
        assert_equal_routes(routing.experts_TK, routing.weights_TK, twin(x_TH, ids_SB))


@pytest.mark.parametrize("kind", ["all", "some", "a sample without"])
def test_balance_is_judged_as_the_library_does(kind: str) -> None:
    # Theirs is a sum over the choices of a token, ours the mean.
    router = router_of(torch.float32, moe_router_topk=3, moe_aux_loss_coeff=(1.0,))
    x_TH, valid_SB = tokens().float(), mask(kind)
    key = DropoutKey(1, 1, 0)
    loss = router(x_TH, Context(dropout=key, valid_SB=valid_SB), SHAPE).losses
    logits_TE = x_TH @ router.weight.detach().t()
    flat = None if valid_SB is None else valid_SB.flatten().long()
    expected = load_balancing_loss_func((logits_TE,), EXPERTS, 3, flat) / 3
    torch.testing.assert_close(loss["load_balancing_loss"].detach(), expected, rtol=1e-6, atol=0)
