"""The router against its formulas written out token by token."""

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron.core import rng, saved_tensors, sharding
from megatron.core.kernels import routing, table
from megatron.core.kernels.routing import Routes
from megatron.core.mesh import Mesh
from megatron.core.models.gpt import GPTModel
from megatron.core.recompute import recompute
from megatron.core.rng import DropoutKey
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.context import Context
from megatron.core.transformer.moe import hashed, noise
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.moe.router_config import RouterConfig
from megatron.core.transformer.moe.routing import rule_of

F64 = torch.float64
HIDDEN, EXPERTS, SHAPE = 6, 8, (5, 3)
TOKENS = SHAPE[0] * SHAPE[1]
KEY = DropoutKey(1, 1, 0)
SIGMOID = {"moe_router_score_function": "sigmoid"}
ROOT = {"moe_router_score_function": "sqrtsoftplus"}
BIAS = {"moe_router_enable_expert_bias": True}
GROUPS = {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 4}
ALL_LOSSES = {
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss"),
    "moe_aux_loss_coeff": (0.3, 0.2, 0.7),
    "moe_z_loss_coeff": 0.1,
}


def config_of(**choices: object) -> TransformerConfig:
    return TransformerConfig.resolve(
        **{
            "num_layers": 1,
            "hidden_size": HIDDEN,
            "num_attention_heads": 1,
            "max_position_embeddings": 16,
            "init_method_std": 1.0,
            **choices,
        }
    )


def router_of(
    dtype: torch.dtype = F64, routes: Routes = routing.REFERENCE, **choices: object
) -> Router:
    """Return a router with drawn weights and, if it has any, drawn biases."""
    config, mesh = config_of(**choices), Mesh.serial()
    router = Router(config, 0, mesh, dtype, num_experts=EXPERTS, routes=routes)
    rng.initialize(router, 7)
    if router.expert_bias is not None:
        drawn = torch.randn(EXPERTS, generator=torch.Generator().manual_seed(5))
        router.expert_bias.copy_(drawn)
    return router


def tokens(seed: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(TOKENS, HIDDEN, dtype=F64, generator=generator)


def mask(kind: str) -> Tensor | None:
    """Return which tokens count: all, some, some without a whole sample, or none."""
    if kind == "all":
        return None
    valid_SB = torch.rand(SHAPE, generator=torch.Generator().manual_seed(11)) < 0.6
    valid_SB[0] = True
    if kind == "a sample without":
        valid_SB[:, 1] = False
    return valid_SB & (kind != "none")


def score(name: str, x: Tensor) -> Tensor:
    return x.sigmoid() if name == "sigmoid" else torch.log1p(x.exp()).sqrt()


def written_out(
    logits_E: Tensor, bias: list[float], config: RouterConfig
) -> tuple[list[int], Tensor, Tensor]:
    """Return a token's experts, their weights, and its probabilities, as the papers have them."""
    name, topk = config.moe_router_score_function, config.moe_router_topk
    soft_E = (logits_E - logits_E.max()).exp() / (logits_E - logits_E.max()).exp().sum()
    score_E = soft_E if name == "softmax" else score(name, logits_E)
    after = name == "softmax" and not config.moe_router_pre_softmax
    judged_E = (logits_E if after else score_E).detach()
    biased = [float(s) + b for s, b in zip(judged_E, bias, strict=True)]
    allowed = list(range(EXPERTS))
    if config.moe_router_num_groups:
        size = EXPERTS // config.moe_router_num_groups
        best = topk // config.moe_router_group_topk
        groups = [range(g, g + size) for g in range(0, EXPERTS, size)]
        groups.sort(key=lambda group: -sum(sorted((biased[e] for e in group), reverse=True)[:best]))
        allowed = [e for group in groups[: config.moe_router_group_topk] for e in group]
    chosen = sorted(allowed, key=lambda e: -biased[e])[:topk]
    weights = score_E[chosen]
    if after or (name != "softmax" and topk > 1):
        weights = weights / weights.sum()
    return chosen, weights * (config.moe_router_topk_scaling_factor or 1.0), score_E / score_E.sum()


def losses_written_out(
    logits_TE: Tensor, config: RouterConfig, valid: list[bool], before: list[Tensor]
) -> dict[str, Tensor]:
    """Return the losses of a microbatch after others, whose logits are ``before``; all count."""
    topk, zero = config.moe_router_topk, logits_TE.new_zeros(())
    plain = replace(config, moe_router_num_groups=None, moe_router_group_topk=None)
    no_bias = [0.0] * EXPERTS

    def counts(rows_TE: Tensor) -> Tensor:
        tops = [written_out(row, no_bias, plain)[2].topk(topk).indices for row in rows_TE]
        return torch.stack([sum((top == e).sum() for top in tops) + zero for e in range(EXPERTS)])

    def loss(rows: list[int], others: list[Tensor]) -> Tensor:
        if not rows:
            return zero
        share_E = sum(written_out(logits_TE[t], no_bias, plain)[2] for t in rows) / len(rows)
        heaps = [logits_TE[rows], *others]
        counts_E = sum(counts(heap.detach()) for heap in heaps)
        return EXPERTS * (share_E * counts_E).sum() / topk / sum(map(len, heaps))

    rows = [t for t in range(TOKENS) if valid[t]]
    samples = [[t for t in rows if t % SHAPE[1] == b] for b in range(SHAPE[1])]
    judged = [loss(own, []) for own in samples if own]
    squares = [logits_TE[t].exp().sum().log() ** 2 for t in rows]
    return {
        "load_balancing_loss": loss(rows, []),
        "seq_load_balancing_loss": sum(judged, start=zero) / max(len(judged), 1),
        "global_load_balancing_loss": loss(rows, before),
        "z_loss": sum(squares, start=zero) / max(len(rows), 1),
    }


def value(routing_weights: Tensor, losses: dict[str, Tensor], config: RouterConfig) -> Tensor:
    """Return a scalar that every output has a part in."""
    factors = torch.arange(1, routing_weights.numel() + 1, dtype=F64).view_as(routing_weights)
    return (routing_weights * factors.cos()).sum() + sum(
        weight * losses[name] for name, weight in config.loss_weights.items()
    )


@pytest.mark.parametrize("groups", [False, True])
def test_of_equal_scores_the_first_experts_are_chosen(groups: bool) -> None:
    """Python's sort, which is stable, on scores most of which are equal."""
    topk, taken, size, experts = 8, 2, 16, 64
    choices = {"moe_router_num_groups": experts // size, "moe_router_group_topk": taken}
    config = config_of(moe_router_topk=topk, **(choices if groups else {})).router
    generator = torch.Generator().manual_seed(4)
    scores_TE = torch.randint(3, (500, experts), generator=generator).float()
    for scores_E, chosen in zip(
        scores_TE.tolist(), routing.choose(scores_TE, rule_of(config)).tolist(), strict=True
    ):
        allowed = list(range(experts))
        if groups:
            blocks = [range(first, first + size) for first in range(0, experts, size)]
            best = {
                b: sorted((scores_E[e] for e in b), reverse=True)[: topk // taken] for b in blocks
            }
            blocks.sort(key=lambda block: -sum(best[block]))
            allowed = sorted(e for block in blocks[:taken] for e in block)
        assert chosen == sorted(allowed, key=lambda e: -scores_E[e])[:topk]


@pytest.mark.parametrize("backend", ["reference", "function"])
@pytest.mark.parametrize("kind", ["all", "some", "a sample without", "none"])
@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"moe_router_topk": 3, "moe_router_pre_softmax": True},
        {"moe_router_topk": 1, "moe_router_pre_softmax": True},
        {"moe_router_topk": 8, "moe_router_topk_scaling_factor": 2.5},
        GROUPS,
        {**GROUPS, "moe_router_pre_softmax": True},
        {**SIGMOID, "moe_router_topk": 1},
        {**SIGMOID, **BIAS, **GROUPS, "moe_router_topk_scaling_factor": 0.7},
        {**ROOT, "moe_router_topk": 3},
        {**ROOT, **BIAS},
    ],
    ids=str,
)
def test_router_equals_what_is_written_out(
    choices: dict[str, object], kind: str, backend: str
) -> None:
    routes = table.TABLE["routing"][backend].implementation
    router, valid_SB = router_of(routes=routes, **ALL_LOSSES, **choices), mask(kind)
    config = router.config
    before = tokens(8)
    router(before, Context(dropout=KEY), SHAPE)
    x_TH = tokens().requires_grad_()
    context = Context(dropout=replace(KEY, microbatch=1), valid_SB=valid_SB)
    routing = router(x_TH, context, SHAPE)
    found = value(routing.weights_TK, dict(routing.losses), config)
    found.backward()
    twin_TH, weight_EH = (x.detach().clone().requires_grad_() for x in (x_TH, router.weight))
    logits_TE = twin_TH @ weight_EH.t()
    bias = router.expert_bias.tolist() if router.expert_bias is not None else [0.0] * EXPERTS
    rows = [written_out(logits_E, bias, config) for logits_E in logits_TE]
    valid = [True] * TOKENS if valid_SB is None else valid_SB.flatten().tolist()
    losses = losses_written_out(logits_TE, config, valid, [before @ weight_EH.detach().t()])
    assert routing.experts_TK.tolist() == [chosen for chosen, _, _ in rows]
    expected = value(torch.stack([weights for _, weights, _ in rows]), losses, config)
    expected.backward()
    assert dict(routing.losses).keys() == config.loss_weights.keys()
    for name, loss in routing.losses.items():
        torch.testing.assert_close(loss, losses[name], msg=name)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(x_TH.grad, twin_TH.grad, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(router.weight.grad, weight_EH.grad, rtol=1e-11, atol=1e-13)
    counts = [sum(valid[t] and e in rows[t][0] for t in range(TOKENS)) for e in range(EXPERTS)]
    assert routing.counts_E.tolist() == routing.kept_counts_E.tolist() == counts


def test_even_loads_have_a_loss_of_one() -> None:
    # Eight tokens in a row, each sure of another expert, and all alike in the second place.
    router = router_of(moe_router_topk=1, moe_router_pre_softmax=True, **ALL_LOSSES)
    router.weight.data.zero_()
    x_TH = torch.zeros(EXPERTS, HIDDEN, dtype=F64)
    with torch.no_grad():
        router.weight[:, 0], router.weight[:, 1] = torch.arange(8.0), -(torch.arange(8.0) ** 2) / 2
    x_TH[:, 0], x_TH[:, 1] = torch.arange(8.0), 1.0
    losses = router(x_TH, Context(dropout=KEY), (EXPERTS, 1)).losses
    counted = router(x_TH, Context(dropout=KEY), (EXPERTS, 1)).counts_E
    assert counted.tolist() == [1] * EXPERTS
    for name in ("load_balancing_loss", "seq_load_balancing_loss", "global_load_balancing_loss"):
        torch.testing.assert_close(losses[name], torch.tensor(1.0, dtype=F64))


def test_losses_belong_to_training() -> None:
    router = router_of(**ALL_LOSSES)
    context = Context(dropout=KEY)
    with torch.no_grad():
        assert router(tokens(), context, SHAPE).losses == {}
    assert router.eval()(tokens(), Context(), SHAPE).losses == {}
    assert len(router.train()(tokens(), context, SHAPE).losses) == 4


def test_recomputation_changes_nothing() -> None:
    kinds = {**ALL_LOSSES, **SIGMOID, **BIAS, "moe_input_jitter_eps": 0.1}
    found = []
    for again in (False, True):
        router, inputs, outs = router_of(**kinds), [], []
        for number in (0, 1):  # both forwards before any backward, as in a pipeline
            context = Context(dropout=replace(KEY, microbatch=number))
            inputs.append(tokens(number).requires_grad_())

            def scalar(x_TH: Tensor, router: Router = router, context: Context = context) -> Tensor:
                routing = router(x_TH, context, SHAPE)
                return value(routing.weights_TK, dict(routing.losses), router.config)

            outs.append(recompute(scalar, inputs[-1]) if again else scalar(inputs[-1]))
        sum(outs).backward()
        grads = [x.grad for x in (*inputs, router.weight)]
        found.append([*outs, *grads, router.tally.counts_E])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert int(found[0][-1].sum()) == 2 * TOKENS * 2


def test_counts_are_of_one_iteration() -> None:
    router = router_of(**ALL_LOSSES, **SIGMOID, **BIAS)
    first = router(tokens(3), Context(dropout=KEY), SHAPE)
    router(tokens(4), Context(dropout=replace(KEY, microbatch=1)), SHAPE)
    later = router(tokens(3), Context(dropout=replace(KEY, iteration=2)), SHAPE)
    assert router.tally.counts_E.equal(first.counts_E)
    assert dict(later.losses) == dict(first.losses)


@pytest.mark.parametrize(
    ("model", "asked", "logits"),
    [
        (torch.bfloat16, None, torch.float32),
        (torch.bfloat16, "fp32", torch.float32),
        (torch.bfloat16, "fp64", F64),
        (torch.float32, "fp64", F64),
        (F64, "fp32", F64),
    ],
)
def test_dtypes(model: torch.dtype, asked: str | None, logits: torch.dtype) -> None:
    router = router_of(model, moe_router_dtype=asked, moe_z_loss_coeff=1.0)
    x_TH = tokens().to(model).requires_grad_()
    routing = router(x_TH, Context(), SHAPE)
    assert routing.losses["z_loss"].dtype == logits
    assert routing.weights_TK.dtype == (F64 if model == F64 else torch.float32)
    (routing.weights_TK[:, 0].sum() + routing.losses["z_loss"]).backward()
    assert x_TH.grad is not None and x_TH.grad.dtype == model
    assert router.weight.grad is not None and router.weight.grad.dtype == model
    exact = x_TH.detach().to(F64) @ router.weight.detach().to(F64).t()
    z_loss = exact.logsumexp(-1).square().mean()
    coarse = model == torch.bfloat16 and asked is None  # products are rounded to bf16
    bound = 2e-2 if coarse else 1e-6 if logits == torch.float32 else 1e-14
    error = abs(float(routing.losses["z_loss"].detach()) / float(z_loss) - 1)
    assert error < bound and (error > 1e-6) == coarse


@pytest.mark.parametrize("postponed", [False, True])
@pytest.mark.parametrize("model", [torch.bfloat16, torch.float16])
def test_a_wider_product_rounds_no_gradient_to_half_and_keeps_its_input_alone(
    model: torch.dtype, postponed: bool
) -> None:
    """Two microbatches add up in an fp32 buffer, as their products in fp64 do."""
    router = router_of(model, moe_router_dtype="fp32")
    weight = router.weight
    weight.grad_dtype = torch.float32
    weight.grad = torch.zeros_like(weight, dtype=torch.float32)
    expected = torch.zeros_like(weight, dtype=F64)
    for number in (0, 1):
        x_TH = tokens(number).to(model).requires_grad_()
        grad_TE = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(number))
        with saved_tensors.counting([weight, x_TH]) as meter:
            logits_TE = router._logits(x_TH, None, None)
        assert meter.now == 0 and logits_TE.dtype == torch.float32
        with layers.postponing() if postponed else nullcontext([]) as tasks:
            logits_TE.backward(grad_TE)
        assert len(tasks) == postponed
        for task in tasks:
            task()
        expected += grad_TE.to(F64).t() @ x_TH.detach().to(F64)
        wanted = (grad_TE.to(F64) @ weight.detach().to(F64)).to(model)
        torch.testing.assert_close(x_TH.grad, wanted)
    torch.testing.assert_close(weight.grad.to(F64), expected, rtol=1e-6, atol=1e-6)
    assert (weight.grad.to(model).float() != weight.grad).float().mean() > 0.9


def test_vanishing_root_scores_have_a_gradient() -> None:
    router = router_of(**ROOT)
    x_TH = tokens() * 1e4
    routing = router(x_TH.requires_grad_(), Context(), SHAPE)
    routing.weights_TK.square().sum().backward()
    assert routing.weights_TK.isfinite().all() and x_TH.grad.isfinite().all()


def test_records() -> None:
    router = Router(
        config_of(**SIGMOID, **BIAS),
        0,
        Mesh.serial(),
        torch.bfloat16,
        num_experts=EXPERTS,
        sequence_parallel=True,
    )
    record = sharding.of(router.weight)
    assert record.shape == (EXPERTS, HIDDEN) and record.decay and record.matrix
    assert record.regions[0].replicated == ("tp",) and record.regions[0].summed == ("tp",)
    bias = router.expert_bias
    assert bias is not None and not bias.requires_grad and bias.dtype == torch.float32
    assert sharding.of(bias).shape == (EXPERTS,) and not sharding.of(bias).decay
    rng.initialize(router, 1)
    assert bias.tolist() == [0.0] * EXPERTS and router.weight.abs().sum() > 0
    assert sharding.of(bias).name == "expert_bias"


def test_jitter_is_drawn_by_token() -> None:
    router, plain = router_of(moe_input_jitter_eps=0.5), router_of()
    generator = torch.Generator().manual_seed(1)
    x_TH = torch.rand(300, HIDDEN, dtype=F64, generator=generator) + 1.0
    seed = noise.seed_of(KEY, "layers.0.jitter")
    factors = noise.jittered(x_TH, torch.arange(300), 0.5, seed) / x_TH
    assert 0.5 <= float(factors.min()) < 0.51 and 1.49 < float(factors.max()) <= 1.5
    assert abs(float(factors.mean()) - 1.0) < 0.02
    later = noise.jittered(x_TH[7:], torch.arange(7, 300), 0.5, seed)
    assert later.equal((x_TH * factors)[7:]) or (later - (x_TH * factors)[7:]).abs().max() < 1e-15
    mine = tokens()
    found = router(mine, Context(dropout=KEY), SHAPE)
    shaken = noise.jittered(mine, torch.arange(TOKENS), 0.5, seed)
    torch.testing.assert_close(found.weights_TK, plain(shaken, Context(), SHAPE).weights_TK)
    other = router(mine, Context(dropout=replace(KEY, microbatch=1)), SHAPE)
    assert not torch.equal(found.weights_TK, other.weights_TK)
    still = router.eval()(mine, Context(), SHAPE)
    torch.testing.assert_close(still.weights_TK, plain(mine, Context(), SHAPE).weights_TK)


def test_forced_balance() -> None:
    router = router_of(moe_router_force_load_balancing=True, moe_router_topk=2)
    x_TH = torch.ones(4000, HIDDEN, dtype=F64).requires_grad_()
    routing = router(x_TH, Context(dropout=KEY), (2000, 2))
    assert abs(routing.counts_E / 1000.0 - 1.0).max() < 0.12
    routing.weights_TK[:, 0].sum().backward()
    assert router.weight.grad is not None and router.weight.grad.abs().max() > 0


def test_experts_by_token_id() -> None:
    router = router_of(moe_n_hash_layers=1, moe_router_topk=3, **ALL_LOSSES)
    ids_SB = torch.randint(0, 50, SHAPE, generator=torch.Generator().manual_seed(2))
    x_TH, context = tokens(), Context(dropout=KEY, tokens_SB=ids_SB)
    routing = router(x_TH, context, SHAPE)
    rows: dict[int, list[int]] = {}
    for t, number in enumerate(ids_SB.flatten().tolist()):
        chosen = routing.experts_TK[t].tolist()
        assert rows.setdefault(number, chosen) == chosen and len(set(chosen)) == 3
        powers = (x_TH[t] @ router.weight.detach().t())[chosen].softmax(-1)
        torch.testing.assert_close(routing.weights_TK[t].detach(), powers)
    assert routing.losses["load_balancing_loss"] == 0 and routing.losses["z_loss"] > 0
    config = config_of(moe_n_hash_layers=1)
    assert not Router(config, 1, Mesh.serial(), F64, num_experts=EXPERTS).by_token_id


def test_depths_of_multi_token_prediction_are_counted_from_0_for_token_ids() -> None:
    config = config_of(
        num_layers=2,
        num_experts=4,
        mtp_num_layers=2,
        moe_n_hash_layers=1,
        moe_router_topk=2,
        position_embedding_type="rope",
    )
    model = GPTModel(config, Mesh.serial(), vocab_size=8, dtype=F64)
    routers = [module for module in model.modules() if isinstance(module, Router)]
    assert [router.by_token_id for router in routers] == [True, False, True, False]


@pytest.mark.parametrize("experts", [1, 2, 6, 7, 64])
def test_the_table_of_token_ids_is_even(experts: int) -> None:
    topk = min(experts, 3)
    chosen = hashed.hashed_experts(torch.arange(6000), 2, experts, topk)
    assert all(len(set(row)) == topk for row in chosen[:100].tolist())
    counts = torch.bincount(chosen.flatten(), minlength=experts) * experts / (6000 * topk)
    assert (counts - 1).abs().max() < 6 * math.sqrt(experts / (6000 * topk))
    elsewhere = hashed.hashed_experts(torch.arange(6000), 3, experts, topk)
    assert experts < 3 or not torch.equal(chosen, elsewhere)
