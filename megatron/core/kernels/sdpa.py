"""Attention through torch's scaled_dot_product_attention, which picks a fused kernel on CUDA.

What the op cannot say in linear memory goes elsewhere: a sink or a soft cap, and a plain window
over a long sequence, are tiled (`blocked`); documents, positions and biases become a mask.

Shapes: S queries, T keys, B batch, n heads, g query groups, D head size, E value head size.
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.kernels.attention import NONE, Extras, Rule, key_distance, visible_keys
from megatron.core.kernels.blocked import attention_blocked


def attention_sdpa(
    q_SBnD: Tensor, k_TBgD: Tensor, v_TBgE: Tensor, rule: Rule, extras: Extras = NONE
) -> Tensor:
    """Return what `attention_reference` returns."""
    if extras.sink_n is not None or rule.softcap is not None or _only_window(rule, extras):
        return attention_blocked(q_SBnD, k_TBgD, v_TBgE, rule, extras)
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q_SBnD, k_TBgD, v_TBgE))
    mask = _mask(q_SBnD, k_TBgD, rule, extras)
    scope = extras.dropout_scope if extras.dropout_p > 0 else None
    with scope or nullcontext():
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=extras.dropout_p,
            is_causal=rule.causal and mask is None,
            scale=rule.scale,
            enable_gqa=k.shape[1] != q.shape[1],
        )
    if mask is not None and (extras.bias is not None or extras.query_positions_BS is not None):
        dead = ~mask if mask.dtype == torch.bool else mask == -torch.inf
        out = out.masked_fill(dead.all(-1, keepdim=True), 0)
    return out.permute(2, 0, 1, 3)


def _only_window(rule: Rule, extras: Extras) -> bool:
    tensors = (extras.packing, extras.query_positions_BS, extras.bias, extras.alibi_slopes_n)
    return rule.window is not None and all(tensor is None for tensor in tensors)


def _mask(q_SBnD: Tensor, k_TBgD: Tensor, rule: Rule, extras: Extras) -> Tensor | None:
    """Return a boolean or additive mask in [B or 1, n or 1, S, T]; None for plain attention."""
    plain = rule.window is None and extras.packing is None and extras.query_positions_BS is None
    if plain and extras.bias is None and extras.alibi_slopes_n is None:
        return None
    S, T, B = q_SBnD.shape[0], k_TBgD.shape[0], q_SBnD.shape[1]
    distance = key_distance(S, T, extras.query_positions_BS, q_SBnD.device)[:, None]
    visible = visible_keys(distance, rule, extras.packing, B)
    if extras.bias is None and extras.alibi_slopes_n is None:
        return visible
    added = q_SBnD.new_zeros(()) if extras.bias is None else extras.bias.to(q_SBnD.dtype)
    if extras.alibi_slopes_n is not None:
        slopes = extras.alibi_slopes_n.to(q_SBnD.device)[:, None, None]
        added = added - (slopes * distance.abs()).to(q_SBnD.dtype)
    if visible is not None:
        added = added.masked_fill(~visible, -torch.inf)
    return added[(None,) * (4 - added.dim())]
