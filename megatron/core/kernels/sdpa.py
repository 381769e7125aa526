"""Attention through torch's scaled_dot_product_attention."""

from contextlib import nullcontext

import torch.nn.functional as F
from torch import Tensor

from megatron.core.kernels.attention import (
    NONE,
    Extras,
    Rule,
    attention_reference,
)


def attention_sdpa(
    q_SBnD: Tensor, k_TBgD: Tensor, v_TBgE: Tensor, rule: Rule, extras: Extras = NONE
) -> Tensor:
    """Return what `attention_reference` returns."""
    plain = extras.packing is None and extras.query_positions_BS is None and rule.window is None
    plain = plain and extras.sink_n is None and extras.alibi_slopes_n is None
    if not plain or extras.bias is not None or rule.softcap is not None:
        return attention_reference(q_SBnD, k_TBgD, v_TBgE, rule, extras)
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q_SBnD, k_TBgD, v_TBgE))
    scope = extras.dropout_scope if extras.dropout_p > 0 else None
    with scope or nullcontext():
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            dropout_p=extras.dropout_p,
            is_causal=rule.causal,
            scale=rule.scale,
            enable_gqa=k.shape[1] != q.shape[1],
        )
    return out.permute(2, 0, 1, 3)
