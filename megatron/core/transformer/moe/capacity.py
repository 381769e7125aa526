"""Full experts: an expert takes so many tokens of a microbatch, and drops what is more.

    capacity = min(ceil(factor * T' K / E), T')                            (`RouterConfig.capacity`)

More than T' never come, since no token chooses an expert twice. Of the choices of an expert the
first ``capacity`` are kept: valid tokens before others, then by weight (policy ``probs``), then in
the order of positions (the whole of policy ``position``). The rule is of the whole microbatch,
whose tokens several ranks may share. (In Megatron-LM each rank has a capacity for its own tokens.)

Tokens with the same history have the same weights but for rounding, whose last bits are another
layout's to change: so weights are compared by the upper half of their bits, about 2^-26 of a weight
in fp64 and 2^-12 in fp32, and those that are equal so far go by positions. By policy ``position``
no layout changes who is dropped; by ``probs`` none does but where two weights lie on either side of
a bound between such steps, and nearer to each other than what two layouts make of one weight. In
fp64, where that is some 1e-15 of it, such a pair is one in 10^7; in fp32 and below it is not rare.

Shapes: T tokens of this rank, T' of the whole microbatch, K chosen experts of each, E experts, N
choices: K for each of T' tokens.
"""

import torch
from torch import Tensor

from megatron.core.transformer.moe.sharers import Sharers


@torch.no_grad()
def kept(
    experts_TK: Tensor,
    weights_TK: Tensor | None,
    late_T: Tensor,
    tokens_T: Tensor,
    limit: int,
    sharers: Sharers,
) -> Tensor:
    """Return which choices their experts keep, kept_TK, bool; a collective of the sharers.

    Args:
        experts_TK: the choices.
        weights_TK: by which full experts choose in turn; None to go by positions alone.
        late_T: whole numbers; tokens with smaller ones come before all others.
        tokens_T: their numbers in the microbatch.
        limit: the capacity.
        sharers: of the microbatch.
    """
    topk = experts_TK.shape[1]
    mine_TX = torch.cat((experts_TK, tokens_T.unsqueeze(1), late_T.unsqueeze(1)), 1)
    numbers_TX = sharers.everything(mine_TX)
    expert_N = numbers_TX[:, :topk].flatten()
    token_N, late_N = (numbers_TX[:, column].repeat_interleave(topk) for column in (-2, -1))
    # The least of the reasons first: a stable sort leaves those before it as they are.
    order_N = token_N.argsort(stable=True)
    if weights_TK is not None:
        order_N = _sorted(order_N, -_step(sharers.everything(weights_TK.detach())).flatten())
    order_N = _sorted(_sorted(order_N, late_N), expert_N)
    sorted_N = expert_N[order_N]
    # Of a run of equal experts, how far each stands behind the first.
    place_N = torch.arange(len(sorted_N), device=sorted_N.device)
    place_N = place_N - torch.searchsorted(sorted_N, sorted_N)
    kept_N = torch.empty_like(place_N, dtype=torch.bool)
    kept_N[order_N] = place_N < limit
    return sharers.own(kept_N.view(-1, topk))


def _step(weights: Tensor) -> Tensor:
    """Return weights, fp32 or fp64 and not negative, as whole numbers: rounded to half their bits.

    The bits of such a number, read as a whole one, stand in its order. It is rounded to the nearest
    step, so that weights such as 1, 1/2 and 1/3 lie within one and not at its bound.
    """
    whole, dropped = (torch.int64, 26) if weights.dtype == torch.float64 else (torch.int32, 11)
    return (weights.contiguous().view(whole) + (1 << (dropped - 1))) >> dropped


def _sorted(order_N: Tensor, reason_N: Tensor) -> Tensor:
    """Return an order by ``reason_N``, and where that is equal as it was."""
    return order_N[reason_N[order_N].argsort(stable=True)]
