"""Softmax of scaled scores over the keys that are visible, for attention in separate products.

Shapes: S queries, T keys, B batch, n heads.
"""

import torch
from torch import Tensor

from megatron.core.kernels.attention import softmax
from megatron.core.kernels.dtypes import accumulate_dtype


def masked_softmax_reference(
    scores_BnST: Tensor, visible_B1ST: Tensor | None, causal: bool, scale: float
) -> Tensor:
    """Return softmax(scale * scores) over visible keys, in the dtype of the scores.

    Exponentials and sums are taken in fp32 or better. A row without a visible key is zeros.

    Args:
        scores_BnST: products of queries and keys.
        visible_B1ST: bool, which keys count; B may be 1. None: all.
        causal: query i sees keys 0 to i; both this and the mask must let a key through.
        scale: positive or negative.
    """
    S, T = scores_BnST.shape[-2:]
    wide_BnST = scores_BnST.to(accumulate_dtype(scores_BnST.dtype)) * scale
    if causal:
        seen_ST = torch.ones(S, T, dtype=torch.bool, device=scores_BnST.device).tril()
        visible_B1ST = seen_ST if visible_B1ST is None else visible_B1ST & seen_ST
    return softmax(wide_BnST, visible_B1ST, None).to(scores_BnST.dtype)
