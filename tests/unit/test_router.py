"""The router against its formulas written out token by token."""

import torch

from megatron.core import rng
from megatron.core.mesh import Mesh
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.context import Context
from megatron.core.transformer.moe.router import Router

F64 = torch.float64
HIDDEN, EXPERTS, SHAPE = 6, 8, (5, 2)


def router_of(**choices: object) -> Router:
    """Return a router in fp64 with drawn weights."""
    config = TransformerConfig.resolve(
        **{
            "num_layers": 1,
            "hidden_size": HIDDEN,
            "num_attention_heads": 1,
            "init_method_std": 1.0,
            "max_position_embeddings": 16,
            **choices,
        }
    )
    router = Router(config, 0, Mesh.serial(), F64, num_experts=EXPERTS)
    rng.initialize(router, 7)
    return router


def tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(SHAPE[0] * SHAPE[1], HIDDEN, dtype=F64, generator=generator)


def test_weights_are_the_softmax_of_the_chosen() -> None:
    router, x_TH = router_of(moe_router_topk=3), tokens()
    routing = router(x_TH, Context(), SHAPE)
    counts = [0] * EXPERTS
    for t, x_H in enumerate(x_TH):
        logits = [float(x_H @ row) for row in router.weight]
        chosen = sorted(range(EXPERTS), key=lambda e: -logits[e])[:3]
        assert routing.experts_TK[t].tolist() == chosen
        powers = torch.tensor([logits[e] for e in chosen], dtype=F64).exp()
        torch.testing.assert_close(routing.weights_TK[t], powers / powers.sum())
        for expert in chosen:
            counts[expert] += 1
    assert routing.counts_E.tolist() == counts and routing.kept_TK is None
