"""The two halves of a cross entropy in Triton; `kernels.cross_entropy` says what they compute.

The statistics take one pass over the logits, of any dtype, which stay as they are: the largest
number so far and the sum of exponentials below it are kept side by side (Milakov & Gimelshein,
2018). The gradient overwrites them. So no matrix of fp32 numbers is ever made.

Shapes: N tokens, v columns on this rank; C columns of a block.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.kernels.cross_entropy import Kernels, Statistics
from megatron.core.kernels.triton_ops.shapes import check_vector

COLUMNS = 2048
WARPS = 4


@triton.jit
def _statistics(
    x_ptr, label_ptr, largest_ptr, total_ptr, target_ptr, summed_ptr, stride, valid,
    SUMMED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    # Not -inf, which less itself is no number; a lane that saw nothing adds exp(-3e38 - largest).
    largest_C = tl.full((C,), -3.0e38, tl.float32)
    total_C = tl.zeros((C,), tl.float32)
    summed_C = tl.zeros((C,), tl.float32)
    for start in range(0, valid, C):
        column_C = start + tl.arange(0, C)
        inside_C = column_C < valid
        x_C = tl.load(x_ptr + row * stride + column_C, mask=inside_C, other=-float("inf"))
        x_C = x_C.to(tl.float32)
        higher_C = tl.maximum(largest_C, x_C)
        total_C = total_C * tl.exp(largest_C - higher_C) + tl.exp(x_C - higher_C)
        largest_C = higher_C
        if SUMMED:
            summed_C += tl.where(inside_C, x_C, 0.0)
    largest = tl.max(largest_C, 0)
    tl.store(largest_ptr + row, largest)
    tl.store(total_ptr + row, tl.sum(total_C * tl.exp(largest_C - largest), 0))
    label = tl.load(label_ptr + row)
    target = tl.load(x_ptr + row * stride + label, mask=label >= 0, other=0.0)
    tl.store(target_ptr + row, target.to(tl.float32))
    if SUMMED:
        tl.store(summed_ptr + row, tl.sum(summed_C, 0))


@triton.jit
def _gradient(
    x_ptr, label_ptr, largest_ptr, divisor_ptr, grad_ptr, own_ptr, stride, valid, columns, spread,
    C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column_C = tl.program_id(1) * C + tl.arange(0, C)
    at_C = x_ptr + row * stride + column_C
    x_C = tl.load(at_C, mask=column_C < valid, other=-float("inf")).to(tl.float32)
    softmax_C = tl.exp(x_C - tl.load(largest_ptr + row)) / tl.load(divisor_ptr + row)
    dx_C = tl.load(grad_ptr + row) * (softmax_C - spread)
    dx_C -= tl.where(column_C == tl.load(label_ptr + row), tl.load(own_ptr + row), 0.0)
    dx_C = tl.where(column_C < valid, dx_C, 0.0)
    tl.store(at_C, dx_C.to(x_ptr.dtype.element_ty), mask=column_C < columns)


def statistics(logits_Nv: Tensor, label_N: Tensor, valid: int, summed: bool) -> Statistics:
    """Return what `kernels.cross_entropy.statistics_reference` returns, in fp32.

    Rows of the logits may stand apart; a largest number below -3e38 comes out as that.
    """
    assert logits_Nv.dim() == 2 and logits_Nv.stride(1) == 1, logits_Nv.stride()
    tokens = len(logits_Nv)
    check_vector(label_N, tokens)
    largest_N, total_N, target_N, summed_N = torch.empty(
        4, tokens, dtype=torch.float32, device=logits_Nv.device
    )
    if tokens:
        _statistics[(tokens,)](
            logits_Nv, label_N, largest_N, total_N, target_N, summed_N, logits_Nv.stride(0), valid,
            SUMMED=summed, C=COLUMNS, num_warps=WARPS,
        )  # fmt: skip
    return Statistics(largest_N, total_N, target_N, summed_N if summed else None, logits_Nv)


def gradient(
    kept_Nv: Tensor,
    label_N: Tensor,
    valid: int,
    largest_N: Tensor | None,
    divisor_N: Tensor,
    grad_N: Tensor,
    own_N: Tensor,
    spread: float,
) -> Tensor:
    """Overwrite the logits with what `kernels.cross_entropy.gradient_reference` returns."""
    tokens, columns = kept_Nv.shape
    assert largest_N is not None
    for vector in (label_N, largest_N, divisor_N, grad_N, own_N):
        check_vector(vector, tokens)
    if kept_Nv.numel():
        _gradient[(tokens, triton.cdiv(columns, COLUMNS))](
            kept_Nv, label_N, largest_N, divisor_N, grad_N, own_N, kept_Nv.stride(0), valid,
            columns, spread, C=COLUMNS, num_warps=WARPS,
        )  # fmt: skip
    return kept_Nv


KERNELS = Kernels(statistics, gradient, keeps_exponentials=False)
