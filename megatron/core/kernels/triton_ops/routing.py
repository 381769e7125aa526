"""Experts and weights of tokens in Triton; `kernels.routing` says what they are.

One program a token. Forward holds all scores of it, as a tile of groups by experts (one group where
there are none), takes the best one at a time, of equals the first, and writes experts and weights,
but no scores. A logit that is no number is the best of all, as in torch. Backward keeps what that
of `kernels.routing_of_chosen` does, and writes each logit's gradient once.

Shapes: E experts, K choices of a token, G groups; e experts of a group, padded as G and K to a
power of two in tiles.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.kernels.routing import TINY, WIDEST_FUSED, Routes, Rule
from megatron.core.kernels.triton_ops.shapes import check_vector

FAR = tl.constexpr(2**30)
"""More than any number of an expert."""
SMALLEST = tl.constexpr(2.0**-126)
"""The least fp32 number with all its digits: `torch.finfo.tiny`."""
TINY_ = tl.constexpr(TINY)
PER_WARP = 512


@triton.jit
def _softplus(x):
    """Return log(1 + exp(x)), to all digits where it is small."""
    small = tl.exp(-tl.abs(x))
    more = 1.0 + small
    # What 1 + small has lost of small, log has lost of the result (Kahan).
    lost = more - 1.0
    log = tl.where(lost > 0.0, tl.log(more) * (small / tl.where(lost > 0.0, lost, 1.0)), small)
    return tl.maximum(x, 0.0) + log


@triton.jit
def _score(x, SCORES: tl.constexpr):
    """Return the score of logits, each by itself."""
    if SCORES == "sigmoid":
        return tl.sigmoid(x)
    elif SCORES == "sqrtsoftplus":
        return tl.sqrt(tl.maximum(_softplus(x), SMALLEST))
    else:
        return x


@triton.jit
def _kept_groups(score_Ge, free_Ge, number_1e, number_G1, G: tl.constexpr, TAKEN: tl.constexpr,
                 BEST: tl.constexpr):  # fmt: skip
    """Return True for the groups whose BEST experts have the largest sums."""
    total_G1 = tl.zeros_like(number_G1).to(tl.float32)
    for _ in tl.static_range(BEST):
        value_Ge = tl.where(free_Ge, score_Ge, -float("inf"))
        most_G1 = tl.max(value_Ge, 1, keep_dims=True)
        best_Ge = free_Ge & (value_Ge >= most_G1)
        first_G1 = tl.min(tl.where(best_Ge, number_1e, FAR), 1, keep_dims=True)
        free_Ge = free_Ge & (number_1e != first_G1)
        total_G1 += most_G1
    total_G1 = tl.where(total_G1 != total_G1, float("inf"), total_G1)
    free_G1 = number_G1 < G
    taken_G1 = number_G1 < 0
    for _ in tl.static_range(TAKEN):
        value_G1 = tl.where(free_G1, total_G1, -float("inf"))
        best_G1 = free_G1 & (value_G1 >= tl.max(value_G1, 0, keep_dims=True))
        first_11 = tl.min(tl.where(best_G1, number_G1, FAR), 0, keep_dims=True)
        taken_G1 = taken_G1 | (number_G1 == first_11)
        free_G1 = free_G1 & (number_G1 != first_11)
    return taken_G1


@triton.jit
def _route(
    logits_ptr, bias_ptr, experts_ptr, weights_ptr, kept_ptr, width, group, factor,
    SCORES: tl.constexpr, HAS_BIAS: tl.constexpr, GIVEN: tl.constexpr, DIVIDES: tl.constexpr,
    G: tl.constexpr, TAKEN: tl.constexpr, BEST: tl.constexpr, K: tl.constexpr,
    G2: tl.constexpr, E2: tl.constexpr, K2: tl.constexpr,
):  # fmt: skip
    """Write a token's experts, unless they are given, and their weights."""
    token = tl.program_id(0).to(tl.int64)
    number_K = tl.arange(0, K2)
    number_G1, number_1e = tl.arange(0, G2)[:, None], tl.arange(0, E2)[None, :]
    free_Ge = (number_G1 < G) & (number_1e < group)
    expert_Ge = number_G1 * group + number_1e
    at = logits_ptr + token * width
    x_Ge = tl.load(at + expert_Ge, mask=free_Ge, other=-float("inf"))
    largest = tl.max(tl.max(x_Ge, 1), 0)
    if SCORES == "softmax":
        score_Ge = tl.exp(x_Ge - largest)
        total = tl.sum(tl.sum(score_Ge, 1), 0)
        score_Ge = score_Ge / total
    else:
        score_Ge = _score(x_Ge, SCORES)
    if GIVEN:
        expert_K = tl.load(experts_ptr + token * K + number_K, mask=number_K < K, other=0)
    else:
        if HAS_BIAS:
            score_Ge += tl.load(bias_ptr + expert_Ge, mask=free_Ge, other=0.0)
        score_Ge = tl.where(score_Ge != score_Ge, float("inf"), score_Ge)
        if TAKEN < G:
            taken_G1 = _kept_groups(score_Ge, free_Ge, number_1e, number_G1, G, TAKEN, BEST)
            free_Ge = free_Ge & taken_G1
        expert_K = tl.zeros((K2,), tl.int32)
        for k in tl.static_range(K):
            value_Ge = tl.where(free_Ge, score_Ge, -float("inf"))
            best_Ge = free_Ge & (value_Ge >= tl.max(tl.max(value_Ge, 1), 0))
            first = tl.min(tl.min(tl.where(best_Ge, expert_Ge, FAR), 1), 0)
            expert_K = tl.where(number_K == k, first, expert_K)
            free_Ge = free_Ge & (expert_Ge != first)
        tl.store(experts_ptr + token * K + number_K, expert_K.to(tl.int64), mask=number_K < K)
    x_K = tl.load(at + expert_K, mask=number_K < K, other=-float("inf"))
    if SCORES == "softmax":
        weight_K = tl.exp(x_K - largest) / total
    elif SCORES == "logits":
        weight_K = tl.exp(x_K - tl.max(x_K, 0))
        weight_K = weight_K / tl.sum(weight_K, 0)
    else:
        tl.store(kept_ptr + token * K + number_K, x_K, mask=number_K < K)
        weight_K = tl.where(number_K < K, _score(x_K, SCORES), 0.0)
        if DIVIDES:
            weight_K = weight_K / (tl.sum(weight_K, 0) + TINY_)
    tl.store(weights_ptr + token * K + number_K, weight_K * factor, mask=number_K < K)


@triton.jit
def _route_backward(
    kept_ptr, experts_ptr, grad_ptr, dlogits_ptr, width, factor,
    SCORES: tl.constexpr, DIVIDES: tl.constexpr, K: tl.constexpr,
    E2: tl.constexpr, K2: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a token's logits."""
    token = tl.program_id(0).to(tl.int64)
    number_K, expert_E = tl.arange(0, K2), tl.arange(0, E2)
    inside_E = expert_E < width
    out_E = tl.zeros((E2,), tl.float32)
    grad_K = tl.load(grad_ptr + token * K + number_K, mask=number_K < K, other=0.0)
    if SCORES == "softmax":
        dx_K = grad_K * factor
    else:
        kept_K = tl.load(kept_ptr + token * K + number_K, mask=number_K < K, other=0.0)
        if SCORES == "logits":
            dx_K = kept_K * (grad_K - tl.sum(kept_K * grad_K, 0) / factor)
        else:
            score_K = tl.where(number_K < K, _score(kept_K, SCORES), 0.0)
            if DIVIDES:
                total = tl.sum(score_K, 0) + TINY_
                grad_K = (grad_K - tl.sum(score_K / total * grad_K, 0)) / total
            if SCORES == "sigmoid":
                slope_K = score_K * (1.0 - score_K)
            else:
                lives_K = (number_K < K) & (_softplus(kept_K) >= SMALLEST)
                slope_K = tl.sigmoid(kept_K) / (2.0 * tl.where(lives_K, score_K, 1.0))
                slope_K = tl.where(lives_K, slope_K, 0.0)
            dx_K = grad_K * factor * slope_K
    for k in tl.static_range(K):
        expert = tl.load(experts_ptr + token * K + k)
        dx = tl.sum(tl.where(number_K == k, dx_K, 0.0), 0)
        out_E = tl.where(expert_E == expert, dx, out_E)
    if SCORES == "softmax":
        x_E = tl.load(kept_ptr + token * width + expert_E, mask=inside_E, other=-float("inf"))
        share_E = tl.exp(x_E - tl.max(x_E, 0))
        share_E = share_E / tl.sum(share_E, 0)
        out_E = share_E * (out_E - tl.sum(share_E * out_E, 0))
    tl.store(dlogits_ptr + token * width + expert_E, out_E, mask=inside_E)


def _warps(elements: int) -> int:
    return min(max(elements // PER_WARP, 1), 8)


def _padded(size: int) -> int:
    return int(triton.next_power_of_2(size))


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TE: Tensor, bias_E: Tensor | None, experts_TK: Tensor | None, rule: Rule
    ) -> tuple[Tensor, Tensor]:
        tokens, width = logits_TE.shape
        assert logits_TE.is_contiguous() and logits_TE.dtype == torch.float32, logits_TE.dtype
        assert rule.topk <= width <= WIDEST_FUSED and width % rule.groups == 0, (width, rule)
        if bias_E is not None:
            check_vector(bias_E, width)
        given = experts_TK is not None
        if experts_TK is None:
            experts_TK = torch.empty(tokens, rule.topk, dtype=torch.int64, device=logits_TE.device)
        else:
            experts_TK = experts_TK.contiguous()
            experts_TK = experts_TK.view_as(experts_TK)  # no input may be a result as it is
        weights_TK = logits_TE.new_empty(tokens, rule.topk)
        kept = weights_TK if rule.scores == "logits" else logits_TE
        if rule.scores in ("sigmoid", "sqrtsoftplus"):
            kept = torch.empty_like(weights_TK)
        each = width // rule.groups
        groups, experts = _padded(rule.groups), _padded(each)
        if tokens:
            _route[(tokens,)](
                logits_TE, bias_E, experts_TK, weights_TK, kept, width, each, rule.factor,
                SCORES=rule.scores, HAS_BIAS=bias_E is not None, GIVEN=given,
                DIVIDES=rule.divides, G=rule.groups, TAKEN=rule.groups_taken,
                BEST=rule.topk // rule.groups_taken, K=rule.topk, G2=groups, E2=experts,
                K2=_padded(rule.topk), num_warps=_warps(groups * experts),
            )  # fmt: skip
        ctx.rule, ctx.width = rule, width
        ctx.mark_non_differentiable(experts_TK)
        ctx.save_for_backward(kept, experts_TK)
        return experts_TK, weights_TK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (kept, experts_TK), rule, width = ctx.saved_tensors, ctx.rule, ctx.width
        dlogits_TE = grads[1].new_empty(len(experts_TK), width)
        if dlogits_TE.numel():
            _route_backward[(len(experts_TK),)](
                kept, experts_TK, grads[1].contiguous(), dlogits_TE, width, rule.factor,
                SCORES=rule.scores, DIVIDES=rule.divides, K=rule.topk, E2=_padded(width),
                K2=_padded(rule.topk), num_warps=_warps(_padded(width)),
            )  # fmt: skip
        return dlogits_TE, None, None, None


def route(logits_TE: Tensor, bias_E: Tensor | None, rule: Rule) -> tuple[Tensor, Tensor]:
    """Return what `kernels.routing.route` returns; logits and bias are in fp32."""
    return _Route.apply(logits_TE.contiguous(), bias_E, None, rule)  # type: ignore[no-any-return]


def weigh(logits_TE: Tensor, experts_TK: Tensor, rule: Rule) -> Tensor:
    """Return what `kernels.routing.weigh` returns; no expert may stand in a row twice."""
    return _Route.apply(logits_TE.contiguous(), None, experts_TK, rule)[1]  # type: ignore[no-any-return]


ROUTES = Routes(route, weigh)
