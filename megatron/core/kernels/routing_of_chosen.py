"""Experts and weights with a backward that keeps of the chosen alone; `routing` is the reference.

Forward is the reference's, bit for bit. With w the weights, f the factor, x the chosen logits, s
their scores, S the sum of these, g the gradient of w, and sums over the chosen:

    what is kept        gradient
    logits        w     dx = w (g - sum(w g) / f)
    sigmoid       x     ds = f (g - sum(s g) / S) / S, dx = ds s (1 - s)
    sqrtsoftplus  x     ds the same, dx = ds sigmoid(x) / 2s
    softmax       all logits, for its gradient is one of all:  dlogit = p (f g - sum(p f g))

and in any case the numbers of the chosen. A single score is no share: ds = f g.

Shapes: T tokens, E experts, K chosen of each token.
"""

from typing import Any

import torch
from torch import Tensor

from megatron.core.kernels import routing
from megatron.core.kernels.routing import TINY, Routes, Rule, scores_of


def route(logits_TE: Tensor, bias_E: Tensor | None, rule: Rule) -> tuple[Tensor, Tensor]:
    """Return what `routing.route` returns."""
    return _Route.apply(logits_TE, bias_E, None, rule)  # type: ignore[no-any-return]


def weigh(logits_TE: Tensor, experts_TK: Tensor, rule: Rule) -> Tensor:
    """Return what `routing.weigh` returns; no expert may stand in a row twice."""
    return _Route.apply(logits_TE, None, experts_TK, rule)[1]  # type: ignore[no-any-return]


FUNCTION = Routes(route, weigh)


def gradient(kept: Tensor, experts_TK: Tensor, grad_TK: Tensor, rule: Rule, width: int) -> Tensor:
    """Return the gradient of the logits, dlogits_TE.

    Args:
        kept: what the docstring of this module says.
        experts_TK: the chosen.
        grad_TK: of the weights.
        rule: of the router.
        width: E.
    """
    if rule.scores == "softmax":
        shares_TE = kept.softmax(-1)
        grad_TK = grad_TK * rule.factor
        sum_T1 = (shares_TE.gather(1, experts_TK) * grad_TK).sum(-1, keepdim=True)
        grad_TE = torch.zeros_like(shares_TE).scatter_(1, experts_TK, grad_TK)
        return grad_TE.sub_(sum_T1).mul_(shares_TE)
    if rule.scores == "logits":
        dx_TK = kept * (grad_TK - (kept * grad_TK).sum(-1, keepdim=True) / rule.factor)
    else:
        dx_TK = _gradient_of_scores(kept, grad_TK, rule)
    return dx_TK.new_zeros(len(dx_TK), width).scatter_(1, experts_TK, dx_TK)


def _gradient_of_scores(x_TK: Tensor, grad_TK: Tensor, rule: Rule) -> Tensor:
    score_TK = scores_of(x_TK, rule)
    if rule.divides:
        sum_T1 = score_TK.sum(-1, keepdim=True) + TINY
        mean_T1 = (score_TK / sum_T1 * grad_TK).sum(-1, keepdim=True)
        grad_TK = (grad_TK - mean_T1) / sum_T1
    if rule.scores == "sigmoid":
        return grad_TK * rule.factor * score_TK * (1 - score_TK)
    lives_TK = routing.softplus(x_TK) >= torch.finfo(x_TK.dtype).tiny
    return grad_TK * rule.factor * x_TK.sigmoid() / (2 * score_TK) * lives_TK


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TE: Tensor, bias_E: Tensor | None, experts_TK: Tensor | None, rule: Rule
    ) -> tuple[Tensor, Tensor]:
        if experts_TK is None:
            experts_TK, weights_TK = routing.route(logits_TE, bias_E, rule)
        else:
            weights_TK = routing.weigh(logits_TE, experts_TK, rule)
            experts_TK = experts_TK.view_as(experts_TK)  # no input may be a result as it is
        ctx.rule, ctx.width = rule, logits_TE.shape[1]
        ctx.mark_non_differentiable(experts_TK)
        match rule.scores:
            case "logits":
                kept = weights_TK
            case "softmax":
                kept = logits_TE
            case _:
                kept = logits_TE.gather(1, experts_TK)
        ctx.save_for_backward(kept, experts_TK)
        return experts_TK, weights_TK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        kept, experts_TK = ctx.saved_tensors
        return gradient(kept, experts_TK, grads[1], ctx.rule, ctx.width), None, None, None
