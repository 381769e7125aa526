"""Which experts a token goes to by its logits, and what they count for: the readable reference.

    logits          weights = softmax of the chosen logits      (Shazeer et al., 2017, 1701.06538)
    softmax         weights = the chosen of the softmax over all experts
    sigmoid         weights = sigmoid(chosen logits) / their sum   (DeepSeek-V3, 2412.19437, eq. 13)
    sqrtsoftplus    weights = sqrt(softplus(chosen logits)) / their sum

    chosen = the k largest of score + bias, the bias of an expert being for this alone; of equal
             ones those with lower numbers

Sums are of k > 1 terms: a single sigmoid is a weight as it is. A factor multiplies all weights.
With groups, experts of the few best groups alone are candidates: a group's score is the sum of its
best k / (groups taken) scores with their biases (DeepSeek-V3, section 2.1.2).

Shapes: T tokens, E experts, K chosen of each token, G groups.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

TINY = 1e-20
"""Added to a sum of scores, as Megatron-LM does."""
WIDEST_FUSED = 4096
"""Experts of which a kernel holds all scores of a token at once."""


@dataclass(frozen=True)
class Rule:
    """How experts are chosen and weighed."""

    topk: int
    scores: Literal["logits", "softmax", "sigmoid", "sqrtsoftplus"]
    groups: int = 1
    groups_taken: int = 1
    factor: float = 1.0
    """On all weights."""

    @property
    def divides(self) -> bool:
        """Return whether weights are scores over their sum."""
        return self.scores in ("sigmoid", "sqrtsoftplus") and self.topk > 1


@dataclass(frozen=True)
class Routes:
    """One implementation: experts and weights of tokens, and weights of experts that are known."""

    route: Callable[[Tensor, Tensor | None, Rule], tuple[Tensor, Tensor]]
    weigh: Callable[[Tensor, Tensor, Rule], Tensor]


def scores_of(logits: Tensor, rule: Rule) -> Tensor:
    """Return the scores by which experts are chosen, before any bias, in the dtype of the logits.

    Where weights are the softmax of the chosen, those are the logits themselves, which stand in the
    order of their softmax.
    """
    match rule.scores:
        case "logits":
            return logits
        case "softmax":
            return logits.softmax(-1)
        case "sigmoid":
            return logits.sigmoid()
        case "sqrtsoftplus":
            # The root of what vanishes has no gradient.
            soft = softplus(logits)
            return soft.clamp_min(torch.finfo(soft.dtype).tiny).sqrt()


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x)), exact where F.softplus is cut off."""
    return -F.logsigmoid(-x)


def choose(scores_TE: Tensor, rule: Rule) -> Tensor:
    """Return the experts of each token, experts_TK, int64, best first; of equals the first.

    Args:
        scores_TE: scores with their biases.
        rule: how many, and of how many groups.
    """
    scores_TE = scores_TE.detach()
    if rule.groups_taken < rule.groups:
        scores_TGe = scores_TE.unflatten(1, (rule.groups, -1))
        best_TG = scores_TGe.topk(rule.topk // rule.groups_taken, -1).values.sum(-1)
        chosen_TG = torch.zeros_like(best_TG, dtype=torch.bool)
        chosen_TG.scatter_(1, best(best_TG, rule.groups_taken), True)
        scores_TE = scores_TGe.masked_fill(~chosen_TG.unsqueeze(-1), -torch.inf).flatten(1)
    return best(scores_TE, rule.topk)


def best(scores_TX: Tensor, count: int) -> Tensor:
    """Return where the largest scores of each token stand, int64, best first; of equals the first.

    `torch.topk` leaves open which of equals it takes. Products in half precision are often equal,
    and those of experts that upcycling made alike always.
    """
    order_TX = scores_TX.sort(dim=-1, descending=True, stable=True).indices
    return order_TX[:, :count].contiguous()


def combine_weights(scores_TE: Tensor, experts_TK: Tensor, rule: Rule) -> Tensor:
    """Return what the outputs of the chosen experts are multiplied by, weights_TK.

    Args:
        scores_TE: `scores_of`, without biases.
        experts_TK: the chosen ones.
        rule: what scores they are, and the factor.
    """
    weights_TK = scores_TE.gather(1, experts_TK)
    if rule.divides:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + TINY)
    elif rule.scores == "logits":
        weights_TK = weights_TK.softmax(-1)
    return weights_TK if rule.factor == 1.0 else weights_TK * rule.factor


def route(logits_TE: Tensor, bias_E: Tensor | None, rule: Rule) -> tuple[Tensor, Tensor]:
    """Return the experts of each token, int64, best first, and their weights, differentiable.

    Args:
        logits_TE: fp32 or finer.
        bias_E: added to scores for the choice; None for none.
        rule: of the router.
    """
    scores_TE = scores_of(logits_TE, rule)
    judged_TE = scores_TE.detach()
    experts_TK = choose(judged_TE if bias_E is None else judged_TE + bias_E, rule)
    return experts_TK, combine_weights(scores_TE, experts_TK, rule)


def weigh(logits_TE: Tensor, experts_TK: Tensor, rule: Rule) -> Tensor:
    """Return the weights of experts that something else has chosen."""
    return combine_weights(scores_of(logits_TE, rule), experts_TK, rule)


REFERENCE = Routes(route, weigh)
