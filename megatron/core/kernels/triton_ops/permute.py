"""Rows that change places, in Triton; `kernels.permute` says what moves where.

One program a token and piece of its channels, or a token: it knows where the token's rows are and
reads and writes each of them once. So nothing is summed by two programs, and backward keeps the
places of the choices alone.

Shapes: T tokens, K choices of each, N rows, H width; C channels of a piece.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.kernels.permute import Moves, Sorted

CHANNELS = 1024
WARPS = 4


@triton.jit
def _spread(x_ptr, places_ptr, y_ptr, rows, width, K: tl.constexpr, C: tl.constexpr):
    """Write a token to each of its rows."""
    token = tl.program_id(0).to(tl.int64)
    column_C = tl.program_id(1) * C + tl.arange(0, C)
    x_C = tl.load(x_ptr + token * width + column_C, mask=column_C < width, other=0.0)
    for k in tl.static_range(K):
        place = tl.load(places_ptr + token * K + k)
        inside_C = (column_C < width) & (place < rows)
        tl.store(y_ptr + place * width + column_C, x_C, mask=inside_C)


@triton.jit
def _join(
    y_ptr, places_ptr, weights_ptr, x_ptr, rows, width,
    HAS_WEIGHTS: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Write the sum of a token's rows, each times its weight where there are weights."""
    token = tl.program_id(0).to(tl.int64)
    column_C = tl.program_id(1) * C + tl.arange(0, C)
    total_C = tl.zeros((C,), tl.float32)
    for k in tl.static_range(K):
        place = tl.load(places_ptr + token * K + k)
        inside_C = (column_C < width) & (place < rows)
        part_C = tl.load(y_ptr + place * width + column_C, mask=inside_C, other=0.0)
        part_C = part_C.to(tl.float32)
        if HAS_WEIGHTS:
            part_C = part_C * tl.load(weights_ptr + token * K + k)
        total_C += part_C
    total_C = total_C.to(x_ptr.dtype.element_ty)
    tl.store(x_ptr + token * width + column_C, total_C, mask=column_C < width)


@triton.jit
def _join_backward(
    grad_ptr, y_ptr, places_ptr, weights_ptr, dy_ptr, dweights_ptr, rows, width,
    K: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a token's rows and weights."""
    token = tl.program_id(0).to(tl.int64)
    for k in tl.static_range(K):
        place = tl.load(places_ptr + token * K + k)
        weight = tl.load(weights_ptr + token * K + k)
        product_C = tl.zeros((C,), tl.float32)
        for start in range(0, width, C):
            column_C = start + tl.arange(0, C)
            inside_C = (column_C < width) & (place < rows)
            grad_C = tl.load(grad_ptr + token * width + column_C, mask=inside_C, other=0.0)
            y_C = tl.load(y_ptr + place * width + column_C, mask=inside_C, other=0.0)
            grad_C = grad_C.to(tl.float32)
            product_C += grad_C * y_C.to(tl.float32)
            dy_C = (grad_C * weight).to(dy_ptr.dtype.element_ty)
            tl.store(dy_ptr + place * width + column_C, dy_C, mask=inside_C)
        tl.store(dweights_ptr + token * K + k, tl.sum(product_C, 0))


def _grid(tokens: int, width: int) -> tuple[int, int]:
    return (tokens, triton.cdiv(width, CHANNELS))


def _joined(y_NH: Tensor, weights_TK: Tensor | None, places_TK: Tensor) -> Tensor:
    rows, width = y_NH.shape
    tokens, choices = places_TK.shape
    x_TH = y_NH.new_empty(tokens, width)
    if x_TH.numel():
        _join[_grid(tokens, width)](
            y_NH, places_TK, weights_TK, x_TH, rows, width,
            HAS_WEIGHTS=weights_TK is not None, K=choices, C=CHANNELS, num_warps=WARPS,
        )  # fmt: skip
    return x_TH


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, by: Sorted) -> Tensor:
        ctx.save_for_backward(by.places_TK)
        (tokens, width), rows = x_TH.shape, len(by.order_N)
        y_NH = x_TH.new_empty(rows, width)
        if x_TH.numel():
            _spread[_grid(tokens, width)](
                x_TH.contiguous(), by.places_TK, y_NH, rows, width,
                K=by.num_choices, C=CHANNELS, num_warps=WARPS,
            )  # fmt: skip
        return y_NH

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _joined(grads[0].contiguous(), None, ctx.saved_tensors[0]), None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_NH: Tensor, weights_TK: Tensor, by: Sorted) -> Tensor:
        assert y_NH.is_contiguous() and weights_TK.is_contiguous(), (y_NH.stride(), weights_TK)
        ctx.save_for_backward(y_NH, weights_TK, by.places_TK)
        return _joined(y_NH, weights_TK, by.places_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        y_NH, weights_TK, places_TK = ctx.saved_tensors
        dy_NH, dweights_TK = torch.empty_like(y_NH), torch.empty_like(weights_TK)
        if dweights_TK.numel():
            _join_backward[(len(weights_TK),)](
                grads[0].contiguous(), y_NH, places_TK, weights_TK, dy_NH, dweights_TK,
                *y_NH.shape, K=places_TK.shape[1], C=CHANNELS, num_warps=WARPS,
            )  # fmt: skip
        return dy_NH, dweights_TK, None


def permute(x_TH: Tensor, by: Sorted) -> Tensor:
    """Return what `kernels.permute.permute` returns."""
    return _Permute.apply(x_TH, by)  # type: ignore[no-any-return]


def unpermute(y_NH: Tensor, weights_TK: Tensor, by: Sorted) -> Tensor:
    """Return what `kernels.permute.unpermute` returns; weights are in fp32."""
    return _Unpermute.apply(y_NH.contiguous(), weights_TK.contiguous(), by)  # type: ignore[no-any-return]


MOVES = Moves(permute, unpermute)
