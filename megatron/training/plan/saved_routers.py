"""What a router saves for its backward, and the rows of experts that are filled up to a capacity.

Its matrix takes the block's input as it is, or what jitter makes of it. All that follows has the
dtype of sums, or a finer one (--moe-router-dtype).

Shapes in comments: T tokens that this rank routes, E experts, K choices of a token.
"""

from typing import Literal

from megatron.core.grid import runs_met
from megatron.core.optimizer.memory import BYTES
from megatron.core.transformer.moe.router_config import DTYPES, Z_LOSS, RouterConfig
from megatron.training.plan.attention_bytes import Piece
from megatron.training.plan.share import Region, Share

INDEX = 8
"""Bytes of the number of a row, a token or an expert, or of a count."""


def router(share: Share, tokens: int) -> tuple[Region, Piece]:
    """Return the region of a router, and the weights that it gives to the choices.

    Args:
        share: of the rank.
        tokens: T.
    """
    config, experts = share.config.model.router, share.config.model.moe.num_experts
    assert experts is not None, "a model without experts"
    topk, size, wanted = config.moe_router_topk, share.size, config.moe_router_dtype
    product = max(size, BYTES[DTYPES[wanted]]) if wanted else size
    wide, choices = max(product, share.main), tokens * topk
    weights = Piece("weights", choices * share.main, share.main)
    taken, late = [share.normed], share.stream
    if config.moe_input_jitter_eps:
        late = tokens * share.config.model.hidden_size * size
        factors = Piece("jitter", late // size * share.main, share.main)
        taken = [Piece("jittered", late, size), factors]
    scores = [
        Piece(f"scores {i}", tokens * experts * wide, wide)
        for i in range(_of_all(config, share.config.process.device))
    ]
    chosen = {
        "weights": [weights if wide == share.main else Piece("fine weights", choices * wide, wide)],
        "others": [Piece("chosen scores", choices * wide, wide)],
    }.get(_of_chosen(config), [])
    rows = _of_tokens(config) * tokens * wide
    sums = [Piece("sums of scores", rows, wide)] if rows else []
    numbers = Piece("experts", choices * INDEX, INDEX)
    saved = (*taken, *scores, *chosen, *sums, numbers)
    return Region("router", saved, late + tokens * experts * product), weights


def _of_all(config: RouterConfig, device: str) -> int:
    """Return how many tensors of [T, E] are saved: of scores, of probabilities, and logits."""
    score, kinds = 1, config.loss_weights
    if config.moe_router_score_function == "sqrtsoftplus":
        # The negated logits, softplus and its root; on the CPU torch keeps an exponential too.
        score = 4 if device == "cpu" else 3
    balanced = score if kinds.keys() - {Z_LOSS} else 0
    plain = config.moe_router_score_function == "softmax" and not config.is_sinkhorn
    if config.moe_router_fusion:
        logits = plain and config.moe_router_pre_softmax
        return balanced + (logits or Z_LOSS in kinds)
    if plain and not config.moe_router_pre_softmax:
        return balanced + 1  # the logits are the scores
    return score + balanced + (Z_LOSS in kinds)


def _of_chosen(config: RouterConfig) -> Literal["weights", "others", "nothing"]:
    """Return what of [T, K] is saved: the weights themselves, or what they are made of."""
    if config.is_sinkhorn:
        return "nothing"
    if config.moe_router_score_function != "softmax":
        divides = config.moe_router_topk > 1
        return "others" if divides or config.moe_router_fusion else "nothing"
    if config.moe_router_pre_softmax:
        return "nothing"
    scaled = config.moe_router_topk_scaling_factor is not None and not config.moe_router_fusion
    return "others" if scaled else "weights"


def _of_tokens(config: RouterConfig) -> int:
    """Return how many tensors of [T, 1] are saved: sums of scores, and logarithms of sums."""
    kinds = config.loss_weights
    logarithms = int(Z_LOSS in kinds)
    if config.moe_router_score_function == "softmax":
        return logarithms
    divides = config.moe_router_topk > 1 and not config.moe_router_fusion
    return logarithms + divides + bool(kinds.keys() - {Z_LOSS})


def filled_rows(share: Share) -> int | None:
    """Return the rows of this rank's experts that are filled up to a capacity; None without."""
    config, model, sizes = share.config, share.config.model, share.config.axis_sizes
    if not model.router.moe_pad_expert_input_to_capacity:
        return None
    experts = model.moe.num_experts
    assert experts is not None, "a model without experts"
    limit = model.router.capacity(share.samples * config.data.seq_length, experts)
    assert limit is not None, "filled up without a capacity"
    sharers = share.tp * config.parallel.context_parallel_size
    return experts // sizes["ep"] * limit * runs_met(sizes["etp_ep"], sharers)
