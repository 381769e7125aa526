"""Full experts, Sinkhorn's assignment, biases of experts, and loads as numbers."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from megatron.core import rng
from megatron.core.distributed.data_parallel import trainable
from megatron.core.mesh import Mesh
from megatron.core.models.gpt import GPTModel
from megatron.core.rng import DropoutKey
from megatron.core.transformer.context import Context
from megatron.core.transformer.moe import capacity, expert_bias, padding, sinkhorn, statistics
from megatron.core.transformer.moe.expert_bias import Tally
from megatron.core.transformer.moe.experts import Experts
from megatron.core.transformer.moe.router import biased_routers, update_expert_biases
from megatron.core.transformer.moe.router_config import RouterConfig
from megatron.core.transformer.moe.sharers import Sharers
from megatron.training.checkpoints import contents
from tests.unit.test_router import (
    BIAS,
    EXPERTS,
    F64,
    KEY,
    SHAPE,
    SIGMOID,
    TOKENS,
    config_of,
    mask,
    router_of,
    tokens,
)

SERIAL = Sharers(Mesh.serial(), sequence_parallel=False)


@pytest.mark.parametrize(
    ("policy", "kind", "factor"),
    [*product(("probs", "position"), ("all", "some"), (0.5, 1.0)), ("probs", "none", 0.01)],
)
def test_full_experts_drop_the_last_in_line(policy: str, kind: str, factor: float) -> None:
    router = router_of(
        moe_router_topk=3, moe_expert_capacity_factor=factor, moe_token_drop_policy=policy
    )
    valid_SB = mask(kind)
    routing = router(tokens(), Context(valid_SB=valid_SB), SHAPE)
    limit = math.ceil(TOKENS * 3 / EXPERTS * factor)
    valid = [True] * TOKENS if valid_SB is None else valid_SB.flatten().tolist()
    lines: dict[int, list[tuple[bool, float, int, int]]] = {e: [] for e in range(EXPERTS)}
    for t, k in product(range(TOKENS), range(3)):
        weight = -float(routing.weights_TK[t, k].detach()) if policy == "probs" else 0.0
        lines[int(routing.experts_TK[t, k])].append((not valid[t], weight, t, k))
    kept = {(t, k) for line in lines.values() for _, _, t, k in sorted(line)[:limit]}
    found = {(t, k) for t, k in product(range(TOKENS), range(3)) if routing.kept_TK[t, k]}
    assert found == kept and 0 < len(found) < TOKENS * 3
    assert routing.capacity == limit
    taken = [sum(not late for late, *_ in sorted(line)[:limit]) for line in lines.values()]
    assert routing.kept_counts_E.tolist() == taken
    chosen = [sum(not late for late, *_ in line) for line in lines.values()]
    assert routing.counts_E.tolist() == chosen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weight", [1.0, 0.5, 1 / 3, 0.123456, 3e-30])
def test_of_weights_that_are_equal_but_for_rounding_the_first_is_kept(
    dtype: torch.dtype, weight: float
) -> None:
    less, more = 1 - 4 * torch.finfo(dtype).eps, 1 + 4 * torch.finfo(dtype).eps
    smaller, larger = 1 - 2e-3, 1 + 2e-3
    factors = torch.tensor([smaller, less, 1.0, more, less, larger], dtype=dtype)
    experts_TK, late_T = torch.zeros(6, 1, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)
    for limit, kept in ((1, [5]), (2, [1, 5]), (3, [1, 2, 5]), (5, [1, 2, 3, 4, 5])):
        weights_TK = (weight * factors)[:, None]
        arguments = (experts_TK, weights_TK, late_T, torch.arange(6), limit, SERIAL)
        assert capacity.kept(*arguments).flatten().nonzero().flatten().tolist() == kept


def test_room_for_all() -> None:
    routing = router_of(moe_expert_capacity_factor=float(EXPERTS))(tokens(), Context(), SHAPE)
    assert routing.kept_TK.all() and routing.kept_counts_E.equal(routing.counts_E)
    assert RouterConfig.resolve(moe_expert_capacity_factor=1.0).capacity(10, 8) == 3


def test_experts_are_filled_up_to_one_size() -> None:
    seen = []

    def compute(x_NH: Tensor, sizes: list[int]) -> Tensor:
        seen.append(sizes)
        factors = torch.arange(1.0, len(sizes) + 1).repeat_interleave(torch.tensor(sizes))
        return (x_NH + 1.0) * factors[:, None]

    found = []
    for sizes in ([3, 0, 2], [0, 0, 0], [1, 6, 0]):
        x_NH = torch.arange(2.0 * sum(sizes)).view(-1, 2).requires_grad_()
        twin_NH = x_NH.detach().clone().requires_grad_()
        for way, rows in ((padding.padded(compute, 4), x_NH), (compute, twin_NH)):
            found.append(way(rows, sizes))
            found[-1].square().sum().backward()
        assert torch.equal(found[-2], found[-1]) and torch.equal(x_NH.grad, twin_NH.grad)
    assert seen[::2] == [[4, 4, 4], [4, 4, 4], [6, 6, 6]]


@pytest.mark.parametrize(("factor", "limit"), [(1.5, 6), (3.9, 16), (4.0, 16), (7.0, 16)])
def test_no_expert_has_room_for_more_than_a_microbatch(factor: float, limit: int) -> None:
    assert RouterConfig.resolve(moe_expert_capacity_factor=factor).capacity(16, 8) == limit


@pytest.mark.parametrize("factor", [EXPERTS / 2 + 1.0, 1e300, 1e308])
def test_layers_fill_up_no_further_than_tokens_may_come(factor: float) -> None:
    found = []
    seen: list[list[int]] = []
    for pads in (False, True):
        config = config_of(
            num_experts=EXPERTS,
            moe_expert_capacity_factor=factor,
            moe_pad_expert_input_to_capacity=pads,
        )
        model = GPTModel(config, Mesh.serial(), vocab_size=50)
        rng.initialize(model, 1)
        for module in model.modules():
            if isinstance(module, Experts):
                module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))
        ids_BS = torch.arange(16).view(1, 16)
        found.append(model(ids_BS, ids_BS))
    assert seen[1:] == [[16] * EXPERTS]
    assert torch.equal(*found)


@pytest.mark.parametrize("pads", [False, True])
def test_layers_fill_up_what_goes_to_their_experts(pads: bool) -> None:
    choices = {"num_experts": EXPERTS, "moe_expert_capacity_factor": 1.5}
    config = config_of(moe_pad_expert_input_to_capacity=pads, **choices)
    model = GPTModel(config, Mesh.serial(), vocab_size=50)
    rng.initialize(model, 1)
    seen: list[list[int]] = []
    for module in model.modules():
        if isinstance(module, Experts):
            module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))
    ids_BS = torch.arange(16).view(1, 16)
    model(ids_BS, ids_BS)
    limit = math.ceil(16 * 2 / EXPERTS * 1.5)
    assert len(seen) == 1 and (seen[0] == [limit] * EXPERTS) == pads
    assert max(seen[0]) <= limit


def plain_sinkhorn(cost_TE: Tensor) -> Tensor:
    """Return the assignment after very many rounds."""
    cost_TE = cost_TE.exp()
    for _ in range(2000):
        cost_TE = cost_TE / cost_TE.sum(1, keepdim=True) / len(cost_TE)
        cost_TE = cost_TE / cost_TE.sum(0, keepdim=True) / cost_TE.shape[1]
    return cost_TE


@pytest.mark.parametrize("kind", ["all", "some"])
def test_sinkhorn_is_even(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinkhorn, "TOLERANCE", 1e-13)
    monkeypatch.setattr(sinkhorn, "SMALL", 0.0)
    generator = torch.Generator().manual_seed(4)
    logits_TE = torch.randn(TOKENS, EXPERTS, dtype=F64, generator=generator) * 2
    valid_SB = mask(kind)
    valid_T = None if valid_SB is None else valid_SB.flatten()
    found_TE = sinkhorn.assignment(logits_TE, valid_T, SERIAL)
    if valid_T is not None:
        assert not valid_T.all()
        found_TE, logits_TE = found_TE[valid_T], logits_TE[valid_T]
    found_TE = found_TE / found_TE.sum(1, keepdim=True) / len(found_TE)
    torch.testing.assert_close(found_TE, plain_sinkhorn(logits_TE), rtol=1e-9, atol=0.0)


@pytest.mark.parametrize("topk", [1, 2])
def test_experts_are_assigned_in_training_alone(topk: int) -> None:
    router = router_of(moe_router_load_balancing_type=("sinkhorn",), moe_router_topk=topk)
    # All tokens like the same experts best, some more than others.
    x_TH = tokens() * 0.1 + 1.0
    logits_TE = x_TH @ router.weight.detach().t()
    scores_TE = logits_TE.sigmoid() if topk == 1 else logits_TE.softmax(-1)
    routing = router(x_TH, Context(dropout=KEY), SHAPE)
    expected_TK = plain_sinkhorn(logits_TE).topk(topk).indices
    assert routing.experts_TK.tolist() == expected_TK.tolist()
    torch.testing.assert_close(routing.weights_TK.detach(), scores_TE.gather(1, expected_TK))
    greedy = router.eval()(x_TH, Context(), SHAPE)
    assert greedy.experts_TK.tolist() == scores_TE.topk(topk).indices.tolist()
    assert greedy.counts_E.max() > routing.counts_E.max()


def test_sinkhorn_ends_where_there_is_nothing_to_even_out() -> None:
    for logits_TE in (
        torch.zeros(3, 4),
        torch.full((3, 4), torch.nan),
        torch.tensor([[1e4, -1e4]]),
    ):
        assert sinkhorn.assignment(logits_TE, None, SERIAL).shape == logits_TE.shape


def test_biases_move_towards_even_loads() -> None:
    router = router_of(**SIGMOID, **BIAS, moe_router_bias_update_rate=0.25)
    before = router.expert_bias.clone()
    keys = [replace(KEY, microbatch=number) for number in (0, 1)]
    counts = sum(
        router(tokens(s), Context(dropout=key, valid_SB=mask("some")), SHAPE).counts_E
        for s, key in zip((3, 4), keys, strict=True)
    )
    router.eval()(tokens(5), Context(), SHAPE)  # an evaluation in between counts nothing
    mean = float(counts.double().mean())
    assert biased_routers([router, router_of()]) == [router]
    update_expert_biases([router])
    steps = ((router.expert_bias - before) / 0.25).round(decimals=9).tolist()
    assert steps == [math.copysign(1.0, mean - c) if c != mean else 0.0 for c in counts.tolist()]
    assert {1.0, -1.0} <= set(steps) and router.expert_bias.grad is None
    after = router.expert_bias.clone()
    update_expert_biases([router])  # nothing was counted since
    assert router.expert_bias.equal(after)


def test_a_bias_is_stored_and_not_trained() -> None:
    router = router_of(torch.bfloat16, **SIGMOID, **BIAS)
    assert trainable([router]) == [[router.weight]]
    stored = contents.items([router], None, Mesh.serial(), saving=True)
    assert [item.key for item in stored] == ["model.weight", "model.expert_bias"]
    (piece,) = stored[1].pieces
    assert piece.tensor.equal(router.expert_bias) and piece.tensor.dtype == torch.float32


def test_exactly_even_loads_leave_biases_alone() -> None:
    tally = Tally(3, torch.device("cpu"))
    tally.add(KEY, torch.tensor([2**40 + 1, 2**40, 2**40 - 1]))
    bias = torch.zeros(3)
    expert_bias.update([tally], [bias], [], 1.0)
    assert bias.tolist() == [-1.0, 0.0, 1.0]
    update_expert_biases([router_of()])  # without a bias nothing happens


def test_an_iteration_that_was_left_out_is_forgotten() -> None:
    tally = Tally(2, torch.device("cpu"))
    tally.add(DropoutKey(1, 5, 0), torch.tensor([3, 1]))
    tally.add(DropoutKey(1, 5, 1), torch.tensor([1, 1]))
    assert tally.counts_E.tolist() == [4, 2]
    tally.add(DropoutKey(1, 6, 0), torch.tensor([0, 1]))
    assert tally.counts_E.tolist() == [0, 1]


def test_loads_as_numbers() -> None:
    counts_LE = torch.tensor([[2, 2, 2, 2], [8, 0, 0, 0], [0, 0, 0, 0]])
    kept_LE = torch.tensor([[2, 2, 2, 2], [2, 0, 0, 0], [0, 0, 0, 0]])
    load = statistics.load(counts_LE, kept_LE.sum(-1))
    assert load.imbalance.tolist() == [1.0, 4.0, 0.0]
    assert load.idle.tolist() == [0.0, 0.75, 1.0]
    assert load.dropped.tolist() == [0.0, 0.75, 0.0]
