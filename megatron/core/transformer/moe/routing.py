"""Where each token goes: experts chosen by score, and the weights that join their outputs.

`kernels.routing` says how that follows from logits.

Shapes: T tokens of this rank, E experts, K chosen of each token.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.kernels.routing import Rule
from megatron.core.transformer.moe.router_config import RouterConfig


@dataclass(frozen=True)
class Routing:
    """What a router decided about the tokens of this rank, and what that costs."""

    experts_TK: Tensor
    """Chosen experts, int64: the best first where a router chooses by score. Tokens are
    those of ``x_SBH.reshape(-1, H)``."""
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


def rule_of(config: RouterConfig) -> Rule:
    """Return the rule by which a router chooses and weighs."""
    name = config.moe_router_score_function
    after = name == "softmax" and not config.moe_router_pre_softmax
    return Rule(
        topk=config.moe_router_topk,
        scores="logits" if after else name,
        groups=config.moe_router_num_groups or 1,
        groups_taken=config.moe_router_group_topk or 1,
        factor=config.moe_router_topk_scaling_factor or 1.0,
    )


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
