"""Full experts: an expert takes so many tokens of a microbatch, and drops what is more.

    capacity = min(ceil(factor * T' K / E), T')                            (`RouterConfig.capacity`)

More than T' never come, since no token chooses an expert twice. Of the choices of an expert the
first ``capacity`` are kept: valid tokens before others, then by weight (policy ``probs``), then in
the order of positions (the whole of policy ``position``). The rule is of the whole microbatch,
whose tokens several ranks may share, so that no layout changes who is dropped. (In Megatron-LM each
rank has a capacity for its own tokens.)

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
        order_N = _sorted(order_N, -sharers.everything(weights_TK.detach()).flatten())
    order_N = _sorted(_sorted(order_N, late_N), expert_N)
    sorted_N = expert_N[order_N]
    # Of a run of equal experts, how far each stands behind the first.
    place_N = torch.arange(len(sorted_N), device=sorted_N.device)
    place_N = place_N - torch.searchsorted(sorted_N, sorted_N)
    kept_N = torch.empty_like(place_N, dtype=torch.bool)
    kept_N[order_N] = place_N < limit
    return sharers.own(kept_N.view(-1, topk))


def _sorted(order_N: Tensor, reason_N: Tensor) -> Tensor:
    """Return an order by ``reason_N``, and where that is equal as it was."""
    return order_N[reason_N[order_N].argsort(stable=True)]
