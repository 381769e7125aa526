"""A masked softmax over keys in Triton; `kernels.masked_softmax` says what it computes.

One program a row. The statistics are taken in one pass, whatever the number of keys, and the
probabilities written in a second one. Where the mask is causal no tensor holds it, and a row is
read up to its own position.

Shapes: S queries, T keys, B batch, n heads; C keys of a block.
"""

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.kernels import unfused

COLUMNS = 1024
WARPS = 4


@triton.jit
def _load(x_ptr, mask_ptr, column_C, limit, scale, HAS_MASK: tl.constexpr):
    """Return scaled scores of a row in fp32, -inf where the row does not look."""
    sees_C = column_C < limit
    if HAS_MASK:
        sees_C = sees_C & (tl.load(mask_ptr + column_C, mask=sees_C, other=0) != 0)
    x_C = tl.load(x_ptr + column_C, mask=sees_C, other=0.0).to(tl.float32)
    return tl.where(sees_C, x_C * scale, -float("inf"))


@triton.jit
def _forward(
    x_ptr, mask_ptr, y_ptr, heads, queries, keys, mask_sample, mask_query, scale,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    query = row % queries
    sample = row // queries // heads
    x_ptr += row * keys
    y_ptr += row * keys
    if HAS_MASK:
        mask_ptr += sample * mask_sample + query * mask_query
    limit = keys
    if CAUSAL:
        limit = tl.minimum(query + 1, keys).to(tl.int32)
    largest_C = tl.full((C,), -3.0e38, tl.float32)
    total_C = tl.zeros((C,), tl.float32)
    for start in range(0, limit, C):
        x_C = _load(x_ptr, mask_ptr, start + tl.arange(0, C), limit, scale, HAS_MASK)
        higher_C = tl.maximum(largest_C, x_C)
        total_C = total_C * tl.exp(largest_C - higher_C) + tl.exp(x_C - higher_C)
        largest_C = higher_C
    largest = tl.max(largest_C, 0)
    total = tl.sum(total_C * tl.exp(largest_C - largest), 0)
    # A row that sees nothing is all zeros.
    divisor = tl.where(total == 0.0, 1.0, total)
    for start in range(0, keys, C):
        column_C = start + tl.arange(0, C)
        x_C = _load(x_ptr, mask_ptr, column_C, limit, scale, HAS_MASK)
        y_C = tl.exp(x_C - largest) / divisor
        tl.store(y_ptr + column_C, y_C.to(y_ptr.dtype.element_ty), mask=column_C < keys)


@triton.jit
def _backward(grad_ptr, y_ptr, dx_ptr, queries, keys, scale, CAUSAL: tl.constexpr, C: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    grad_ptr += row * keys
    y_ptr += row * keys
    dx_ptr += row * keys
    limit = keys
    if CAUSAL:
        limit = tl.minimum(row % queries + 1, keys).to(tl.int32)
    sum_C = tl.zeros((C,), tl.float32)
    for start in range(0, limit, C):
        column_C = start + tl.arange(0, C)
        y_C = tl.load(y_ptr + column_C, mask=column_C < limit, other=0.0).to(tl.float32)
        grad_C = tl.load(grad_ptr + column_C, mask=column_C < limit, other=0.0).to(tl.float32)
        sum_C += y_C * grad_C
    inner = tl.sum(sum_C, 0)
    for start in range(0, keys, C):
        column_C = start + tl.arange(0, C)
        y_C = tl.load(y_ptr + column_C, mask=column_C < limit, other=0.0).to(tl.float32)
        grad_C = tl.load(grad_ptr + column_C, mask=column_C < limit, other=0.0).to(tl.float32)
        dx_C = y_C * (grad_C - inner) * scale
        tl.store(dx_ptr + column_C, dx_C.to(dx_ptr.dtype.element_ty), mask=column_C < keys)


class _MaskedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scores_BnST: Tensor, visible_B1ST: Tensor | None, causal: bool, scale: float
    ) -> Tensor:
        assert scores_BnST.is_contiguous(), scores_BnST.stride()
        B, heads, S, T = scores_BnST.shape
        strides = (0, 0)
        if visible_B1ST is not None:
            assert visible_B1ST.dtype == torch.bool and visible_B1ST.stride(3) == 1
            assert visible_B1ST.shape in ((1, 1, S, T), (B, 1, S, T)), visible_B1ST.shape
            strides = (visible_B1ST.stride(0) * (len(visible_B1ST) > 1), visible_B1ST.stride(2))
            visible_B1ST = visible_B1ST.view(torch.uint8)
        probs_BnST = torch.empty_like(scores_BnST)
        if probs_BnST.numel():
            _forward[(B * heads * S,)](
                scores_BnST, visible_B1ST, probs_BnST, heads, S, T, *strides, scale,
                CAUSAL=causal, HAS_MASK=visible_B1ST is not None, C=COLUMNS, num_warps=WARPS,
            )  # fmt: skip
        ctx.save_for_backward(probs_BnST)
        ctx.causal, ctx.scale = causal, scale
        return probs_BnST

    @staticmethod
    def backward(ctx: Any, grad_BnST: Tensor) -> tuple[Tensor, None, None, None]:
        (probs_BnST,) = ctx.saved_tensors
        dscores_BnST = torch.empty_like(probs_BnST)
        S, T = probs_BnST.shape[2:]
        if dscores_BnST.numel():
            _backward[(probs_BnST[..., 0].numel(),)](
                grad_BnST.contiguous(), probs_BnST, dscores_BnST, S, T, ctx.scale,
                CAUSAL=ctx.causal, C=COLUMNS, num_warps=WARPS,
            )  # fmt: skip
        return dscores_BnST, None, None, None


def masked_softmax(
    scores_BnST: Tensor, visible_B1ST: Tensor | None, causal: bool, scale: float
) -> Tensor:
    """Return what `kernels.masked_softmax.masked_softmax_reference` returns.

    The scores must be contiguous; the rows of the mask may stand apart.
    """
    return _MaskedSoftmax.apply(scores_BnST, visible_B1ST, causal, scale)  # type: ignore[no-any-return]


attention_unfused = partial(unfused.attention_unfused, softmax=masked_softmax)
"""`kernels.unfused.attention_unfused` with this softmax between its products."""
