"""Attention as two products with a softmax between them, each an operation of its own.

The products are taken in the input's dtype, on whatever multiplies matrices fastest; the softmax
is a parameter, so that it can be a fused one. All scores exist at once, S x T for each head.

Scores in half precision are those of scaled queries: without the scale a product of D channels
passes 65504, the largest number of fp16, long before scores do. What is added to scores, and their
soft cap, are counted in fp32, in which they then stay.

Shapes: S queries, T keys, B batch, n heads, g query groups, D head size, E value head size.
"""

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.kernels.attention import NONE, Extras, Rule, key_distance, visible_keys
from megatron.core.kernels.dtypes import accumulate_dtype
from megatron.core.kernels.masked_softmax import masked_softmax_reference
from megatron.core.kernels.matmul import matmul


def attention_unfused(
    q_SBnD: Tensor,
    k_TBgD: Tensor,
    v_TBgE: Tensor,
    rule: Rule,
    extras: Extras = NONE,
    softmax: Callable[..., Tensor] = masked_softmax_reference,
) -> Tensor:
    """Return what `attention_reference` returns, without a sink.

    ``softmax`` has the signature of `masked_softmax_reference`.
    """
    assert extras.sink_n is None, "another backend is chosen for an extra logit"
    S, B, n, _ = q_SBnD.shape
    T, g = k_TBgD.shape[0], k_TBgD.shape[2]
    q_BnSD = (q_SBnD * rule.scale).permute(1, 2, 0, 3)
    k_BnTD = k_TBgD.permute(1, 2, 0, 3).repeat_interleave(n // g, 1)
    v_BnTE = v_TBgE.permute(1, 2, 0, 3).repeat_interleave(n // g, 1)
    scores_BnST = matmul(q_BnSD, k_BnTD.transpose(-1, -2))
    hides = (extras.packing, extras.query_positions_BS, extras.valid_BT)
    plain = rule.window is None and all(one is None for one in hides)
    adds = extras.alibi_slopes_n is not None or extras.bias is not None
    if rule.softcap is not None or adds:
        scores_BnST = scores_BnST.to(accumulate_dtype(scores_BnST.dtype))
    if rule.softcap is not None:
        scores_BnST = rule.softcap * torch.tanh(scores_BnST / rule.softcap)
    distance_B1ST = None
    if adds or not plain:
        distance_B1ST = key_distance(S, T, extras.query_positions_BS, q_SBnD.device)
    if extras.alibi_slopes_n is not None:
        assert distance_B1ST is not None
        slopes_n11 = extras.alibi_slopes_n.to(scores_BnST)[:, None, None]
        scores_BnST = scores_BnST - slopes_n11 * distance_B1ST.abs()
    if extras.bias is not None:
        scores_BnST = scores_BnST + extras.bias
    visible_B1ST = None
    if not plain:
        assert distance_B1ST is not None
        visible_B1ST = visible_keys(distance_B1ST, rule, extras, B)
    probs_BnST = softmax(scores_BnST.contiguous(), visible_B1ST, rule.causal and plain, 1.0)
    probs_BnST = probs_BnST.to(v_TBgE.dtype)
    if extras.dropout_p > 0:
        with extras.dropout_scope or nullcontext():
            probs_BnST = F.dropout(probs_BnST, extras.dropout_p)
    return matmul(probs_BnST, v_BnTE).permute(2, 0, 1, 3)
