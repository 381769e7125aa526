"""Attention through torch's scaled_dot_product_attention, which picks a fused kernel on CUDA.

What the op cannot say in linear memory goes elsewhere: a sink or a soft cap, and a plain window
over a long sequence, are tiled (`blocked`); documents, padding, positions and biases become a mask.

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
    q_BnSD, k_BgTD, v_BgTE = (x.permute(1, 2, 0, 3) for x in (q_SBnD, k_TBgD, v_TBgE))
    mask_BnST = _mask(q_SBnD, k_TBgD, rule, extras)
    scope = extras.dropout_scope if extras.dropout_p > 0 else None
    with scope or nullcontext():
        out_BnSE = F.scaled_dot_product_attention(
            q_BnSD,
            k_BgTD,
            v_BgTE,
            attn_mask=mask_BnST,
            dropout_p=extras.dropout_p,
            is_causal=rule.causal and mask_BnST is None,
            scale=rule.scale,
            enable_gqa=k_BgTD.shape[1] != q_BnSD.shape[1],
        )
    may_see_none = (extras.bias, extras.query_positions_BS, extras.valid_BT)
    if mask_BnST is not None and any(one is not None for one in may_see_none):
        hidden_BnST = ~mask_BnST if mask_BnST.dtype == torch.bool else mask_BnST == -torch.inf
        out_BnSE = out_BnSE.masked_fill(hidden_BnST.all(-1, keepdim=True), 0)
    return out_BnSE.permute(2, 0, 1, 3)


def _only_window(rule: Rule, extras: Extras) -> bool:
    tensors = (
        *(extras.packing, extras.query_positions_BS, extras.valid_BT),
        *(extras.bias, extras.alibi_slopes_n),
    )
    return rule.window is not None and all(tensor is None for tensor in tensors)


def _mask(q_SBnD: Tensor, k_TBgD: Tensor, rule: Rule, extras: Extras) -> Tensor | None:
    """Return a boolean or additive mask_BnST, with B and n 1 where those agree; None for none."""
    hides = (extras.packing, extras.query_positions_BS, extras.valid_BT)
    plain = rule.window is None and all(one is None for one in hides)
    if plain and extras.bias is None and extras.alibi_slopes_n is None:
        return None
    S, T, B = q_SBnD.shape[0], k_TBgD.shape[0], q_SBnD.shape[1]
    distance_B1ST = key_distance(S, T, extras.query_positions_BS, q_SBnD.device)
    visible_B1ST = visible_keys(distance_B1ST, rule, extras, B)
    if extras.bias is None and extras.alibi_slopes_n is None:
        return visible_B1ST
    added_BnST = q_SBnD.new_zeros(()) if extras.bias is None else extras.bias.to(q_SBnD.dtype)
    if extras.alibi_slopes_n is not None:
        slopes_n11 = extras.alibi_slopes_n.to(q_SBnD.device)[:, None, None]
        added_BnST = added_BnST - (slopes_n11 * distance_B1ST.abs()).to(q_SBnD.dtype)
    if visible_B1ST is not None:
        added_BnST = added_BnST.masked_fill(~visible_B1ST, -torch.inf)
    return added_BnST[(None,) * (4 - added_BnST.dim())]
