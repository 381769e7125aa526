"""Where each token goes: experts chosen by score, and the weights that join their outputs.

    softmax         weights = softmax of the chosen logits; with pre-softmax the chosen of the
                    softmax over all of them                    (Shazeer et al., 2017, 1701.06538)
    sigmoid         weights = sigmoid(chosen logits) / their sum   (DeepSeek-V3, 2412.19437, eq. 13)
    sqrtsoftplus    weights = sqrt(softplus(chosen logits)) / their sum

    chosen = the k largest of score + bias, the bias of an expert (expert_bias) being for this
             alone; of equal ones those with lower numbers

Sums are of k > 1 terms: a single sigmoid is a weight as it is. A factor multiplies all weights.
With groups, experts of the few best groups alone are candidates: a group's score is the sum of its
best k / (groups taken) scores with their biases (DeepSeek-V3, section 2.1.2).

Shapes: T tokens of this rank, E experts, K chosen of each token, G groups.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.transformer.moe.router_config import RouterConfig

TINY = 1e-20
"""Added to a sum of scores, as Megatron-LM does."""


@dataclass(frozen=True)
class Routing:
    """What a router decided about the tokens of this rank, and what that costs."""

    experts_TK: Tensor
    """Chosen experts, int64, the best first. Tokens are those of ``x_SBH.reshape(-1, H)``."""
    weights_TK: Tensor
    """What an expert's output is multiplied by: fp32, or fp64 in an fp64 model; differentiable."""
    kept_TK: Tensor | None
    """False where the expert is full and the choice is dropped, bool; None where all are kept."""
    losses: Mapping[str, Tensor]
    """Auxiliary losses of the microbatch without their coefficients, scalars that are equal on all
    ranks that share it; `RouterConfig.loss_weights` has their names. The gradient of each rank is
    that of its own tokens. Empty where no gradients are taken."""
    counts_E: Tensor
    """How often each expert was chosen by valid tokens of this rank, dropped choices counted;
    int64."""
    kept_counts_E: Tensor
    """Those of them that the experts took."""
    capacity: int | None = None
    """Tokens of the whole microbatch that an expert takes at most."""


def scores_of(logits_TE: Tensor, config: RouterConfig) -> Tensor:
    """Return the scores by which experts are chosen, before any bias, in the dtype of the logits.

    Without pre-softmax those are the logits themselves, which stand in the order of their softmax.
    """
    match config.moe_router_score_function:
        case "softmax":
            return logits_TE.softmax(-1) if config.moe_router_pre_softmax else logits_TE
        case "sigmoid":
            return logits_TE.sigmoid()
        case "sqrtsoftplus":
            # softplus(x) = -log(sigmoid(-x)), exact where F.softplus is cut off; the root of what
            # vanishes has no gradient.
            softplus_TE = -F.logsigmoid(-logits_TE)
            return softplus_TE.clamp_min(torch.finfo(softplus_TE.dtype).tiny).sqrt()


def choose(scores_TE: Tensor, config: RouterConfig) -> Tensor:
    """Return the experts of each token, experts_TK, int64, best first; of equals the first.

    Args:
        scores_TE: scores with their biases.
        config: how many, and of how many groups.
    """
    scores_TE = scores_TE.detach()
    groups, taken = config.moe_router_num_groups, config.moe_router_group_topk
    if groups is not None and taken is not None:
        scores_TGe = scores_TE.unflatten(1, (groups, -1))
        best_TG = scores_TGe.topk(config.moe_router_topk // taken, -1).values.sum(-1)
        chosen_TG = torch.zeros_like(best_TG, dtype=torch.bool)
        chosen_TG.scatter_(1, best(best_TG, taken), True)
        scores_TE = scores_TGe.masked_fill(~chosen_TG.unsqueeze(-1), -torch.inf).flatten(1)
    return best(scores_TE, config.moe_router_topk)


def best(scores_TX: Tensor, count: int) -> Tensor:
    """Return where the largest scores of each token stand, int64, best first; of equals the first.

    `torch.topk` leaves open which of equals it takes. Products in half precision are often equal,
    and those of experts that upcycling made alike always.
    """
    order_TX = scores_TX.sort(dim=-1, descending=True, stable=True).indices
    return order_TX[:, :count].contiguous()


def combine_weights(scores_TE: Tensor, experts_TK: Tensor, config: RouterConfig) -> Tensor:
    """Return what the outputs of the chosen experts are multiplied by, weights_TK.

    Args:
        scores_TE: `scores_of`, without biases.
        experts_TK: the chosen ones.
        config: the score function and the factor.
    """
    weights_TK = scores_TE.gather(1, experts_TK)
    if config.moe_router_score_function != "softmax":
        if config.moe_router_topk > 1:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + TINY)
    elif not config.moe_router_pre_softmax:
        weights_TK = weights_TK.softmax(-1)
    factor = config.moe_router_topk_scaling_factor
    return weights_TK if factor is None else weights_TK * factor


def count(
    experts_TK: Tensor, num_experts: int, valid_T: Tensor | None, kept_TK: Tensor | None = None
) -> Tensor:
    """Return how often valid tokens chose each expert and were kept, counts_E, int64."""
    counted_TK = torch.ones_like(experts_TK) if kept_TK is None else kept_TK.long()
    if valid_T is not None:
        counted_TK = counted_TK * valid_T.unsqueeze(1)
    # Sums of whole numbers are the same in any order; bincount is not deterministic on CUDA.
    counts_E = experts_TK.new_zeros(num_experts)
    return counts_E.scatter_add_(0, experts_TK.flatten(), counted_TK.flatten())
