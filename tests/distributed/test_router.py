"""Routers that share a microbatch decide, cost and learn as one router does.

Each case routes four microbatches of two samples. Every rank holds its share of the tokens, and
what comes back is put together by their numbers: choices, weights, losses, biases, and gradients of
the input and of the router's matrix, all in fp64.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core import comm, rng, sharding
from megatron.core.context_parallel.partition import cut
from megatron.core.grid import ParallelConfig
from megatron.core.mesh import Mesh
from megatron.core.rng import DropoutKey
from megatron.core.tensor_parallel.mappings import own_slice
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.context import Context
from megatron.core.transformer.moe.router import Router, update_expert_biases
from tests.harness import Pool

F64 = torch.float64
SEQUENCE, SAMPLES, HIDDEN, EXPERTS, MICROBATCHES = 16, 2, 6, 8, 4
LOSSES = {
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss"),
    "moe_aux_loss_coeff": (0.3, 0.2, 0.7),
    "moe_z_loss_coeff": 0.1,
}
SIGMOID = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.25,
}
VARIANTS: dict[str, dict[str, object]] = {
    "softmax": {**LOSSES, "moe_router_topk": 3, "moe_input_jitter_eps": 0.3},
    "biased groups": {
        **LOSSES,
        **SIGMOID,
        "moe_router_topk": 4,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
    },
    "dropped by weight": {**LOSSES, "moe_expert_capacity_factor": 0.75},
    "dropped by position": {
        "moe_router_pre_softmax": True,
        "moe_expert_capacity_factor": 0.75,
        "moe_token_drop_policy": "position",
    },
    "sinkhorn": {"moe_router_load_balancing_type": ("sinkhorn",), "moe_z_loss_coeff": 0.1},
    "token ids": {"moe_router_score_function": "sqrtsoftplus", "moe_n_hash_layers": 1},
    "forced": {**LOSSES, "moe_router_force_load_balancing": True},
}
LAYOUTS = {
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "tp2 sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "cp2": (2, {"context_parallel_size": 2}),
    "dp2": (2, {}),
    "dp4": (4, {}),
    "tp2 sp cp2": (
        4,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2},
    ),
    "tp4 sp": (4, {"tensor_model_parallel_size": 4, "sequence_parallel": True}),
    "cp2 dp2": (4, {"context_parallel_size": 2}),
    # Positions do not divide: the last ones of each context-parallel rank are added.
    "tp3 sp": (3, {"tensor_model_parallel_size": 3, "sequence_parallel": True}),
    "tp3 sp cp2": (
        6,
        {"tensor_model_parallel_size": 3, "sequence_parallel": True, "context_parallel_size": 2},
    ),
}
SLOW = ("dp4", "tp4 sp", "tp3 sp cp2")


def drawn(number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the input, the mask and the token ids of a microbatch; the last has few that count."""
    generator = torch.Generator().manual_seed(100 + number)
    shape = (SEQUENCE, SAMPLES)
    x_SBH = torch.randn(*shape, HIDDEN, dtype=F64, generator=generator)
    valid_SB = torch.rand(shape, generator=generator) < (0.7 if number < 3 else 0.1)
    return x_SBH, valid_SB, torch.randint(0, 99, shape, generator=generator)


def routed(
    rank: int, layout: dict[str, Any], choices: dict[str, object], masked: bool, main: float
) -> dict[str, Any]:
    """Return what this rank's router made of its tokens.

    The scalar that is differentiated is ``main`` times a sum over all weights, plus the losses.
    """
    parallel = ParallelConfig.resolve(**layout)
    mesh = Mesh.create(parallel, torch.device("cpu"))
    config = TransformerConfig.resolve(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        max_position_embeddings=SEQUENCE,
        init_method_std=1.0,
        **choices,
    )
    sequence_parallel = parallel.sequence_parallel
    router = Router(config, 0, mesh, F64, num_experts=EXPERTS, sequence_parallel=sequence_parallel)
    rng.initialize(router, 7)
    found: dict[str, Any] = {"tokens": {}, "losses": {}}
    for number in range(mesh.dp.coordinate, MICROBATCHES, mesh.dp.size):
        cp = (mesh.cp.coordinate, mesh.cp.size)
        numbers = torch.arange(SEQUENCE * SAMPLES).view(SEQUENCE, SAMPLES)
        x_SBH, valid_SB, ids_SB, mine = (cut(x, 0, *cp) for x in (*drawn(number), numbers))
        filled = -len(mine) % mesh.tp.size
        if not masked:
            valid_SB = torch.ones_like(valid_SB)
        if filled:
            x_SBH = F.pad(x_SBH, (0, 0, 0, 0, 0, filled), value=1.0)
            valid_SB, ids_SB = (F.pad(x, (0, 0, 0, filled)) for x in (valid_SB, ids_SB))
            mine = F.pad(mine, (0, 0, 0, filled), value=-1)
        if sequence_parallel:
            x_SBH, mine = own_slice(x_SBH, mesh.tp), own_slice(mine, mesh.tp)
        x_TH = x_SBH.reshape(-1, HIDDEN).clone().requires_grad_()
        context = Context(
            dropout=DropoutKey(3, 1, number, mesh.cp.coordinate),
            valid_SB=valid_SB if masked or filled else None,
            tokens_SB=ids_SB,
        )
        routing = router(x_TH, context, tuple(x_SBH.shape[:2]), filled=filled)
        topk = config.router.moe_router_topk
        factors_TK = (mine.reshape(-1, 1) * topk + torch.arange(topk)).to(F64).cos()
        factors_TK = factors_TK * (mine.reshape(-1, 1) >= 0)
        weighted = [w * routing.losses[name] for name, w in config.router.loss_weights.items()]
        (main * (routing.weights_TK * factors_TK).sum() + sum(weighted)).backward()
        kept_TK = routing.kept_TK
        rows = [routing.experts_TK, routing.weights_TK, x_TH.grad]
        rows += [] if kept_TK is None else [kept_TK]
        for place, *parts in zip(mine.flatten().tolist(), *rows, strict=True):
            if place >= 0:
                found["tokens"][number, place] = [part.tolist() for part in parts]
        found["losses"][number] = {name: float(x.detach()) for name, x in routing.losses.items()}
        found["counts"] = found.get("counts", 0) + routing.counts_E
    grad = router.weight.grad.clone()
    summed = [mesh[name] for name in sharding.of(router.weight).regions[0].summed]
    for axis in (mesh.dp_cp, *summed):
        comm.all_reduce(grad, axis)
        comm.all_reduce(found["counts"], axis)
    update_expert_biases([router])
    bias = router.expert_bias
    return {**found, "gradient": grad, "bias": None if bias is None else bias.detach()}


def together(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the ranks found as one; where several know something they agree."""
    whole: dict[str, Any] = {"tokens": {}, "losses": {}}
    for found in ranks:
        for kind in ("tokens", "losses"):
            for place, value in found[kind].items():
                assert_alike(whole[kind].setdefault(place, value), value)
        for kind in ("gradient", "bias", "counts"):
            assert_alike(whole.setdefault(kind, found[kind]), found[kind])
    return whole


def assert_alike(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


SERIAL: dict[tuple[str, bool], dict[str, Any]] = {}


@pytest.mark.parametrize(
    "masked",
    [pytest.param(False, id="all count", marks=pytest.mark.slow), pytest.param(True, id="masked")],
)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "layout",
    [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in LAYOUTS],
)
def test_equals_the_serial_router(pool: Pool, layout: str, variant: str, masked: bool) -> None:
    if (variant, masked) not in SERIAL:
        SERIAL[variant, masked] = together([routed(0, {}, VARIANTS[variant], masked, 1.0)])
    expected, (world, sizes) = SERIAL[variant, masked], LAYOUTS[layout]
    found = together(pool.run(world, routed, sizes, VARIANTS[variant], masked, 1.0))
    assert len(found["tokens"]) == MICROBATCHES * SEQUENCE * SAMPLES
    assert_alike(found, expected)


@pytest.mark.parametrize("layout", ["tp2", "tp2 sp", "cp2"])
def test_par_17_the_routers_gradient_of_its_losses_alone(pool: Pool, layout: str) -> None:
    # Its scale went with the number of tensor-parallel ranks.
    world, sizes = LAYOUTS[layout]
    expected = together([routed(0, {}, LOSSES, False, 0.0)])["gradient"]
    found = together(pool.run(world, routed, sizes, LOSSES, False, 0.0))["gradient"]
    assert expected.abs().max() > 1e-3
    assert_alike(found, expected)


@pytest.mark.parametrize("layout", ["tp2 sp", "cp2"])
def test_par_19_a_mask_does_not_double_the_gradient_of_balance(pool: Pool, layout: str) -> None:
    # The sum over ranks was written over a rank's own count of tokens.
    world, sizes = LAYOUTS[layout]
    choices = {"moe_aux_loss_coeff": (1.0,)}
    expected = together([routed(0, {}, choices, True, 0.0)])
    found = together(pool.run(world, routed, sizes, choices, True, 0.0))
    assert expected["gradient"].abs().max() > 1e-3
    assert_alike(found["gradient"], expected["gradient"])
    assert_alike(found["counts"], expected["counts"])
