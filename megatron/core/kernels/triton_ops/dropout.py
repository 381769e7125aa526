"""residual + dropout(y + bias) in Triton; `kernels.dropout` says what it computes.

The mask is drawn by counting (`kernels.philox`), in forward and again in backward: nothing is kept
but the seed. One block of random words serves four elements that stand side by side.

Shapes: N rows, H hidden, P programs; R rows and C columns of a tile, G = C / 4.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.kernels.philox import halves, threshold
from megatron.core.kernels.triton_ops.shapes import (
    as_rows,
    check_vector,
    flat_tile,
    share,
    side_by_side,
    wider,
)


@triton.jit
def _kept(row_R, group_G, key_low, key_high, bar, R: tl.constexpr, C: tl.constexpr):
    """Return which elements of a tile are kept, kept_RC."""
    c0_RG = (tl.zeros((R, C // 4), tl.int32) + group_G[None, :]).to(tl.uint32)
    c1_RG = (tl.zeros((R, C // 4), tl.int64) + row_R[:, None]).to(tl.uint32)
    c2_RG = (tl.zeros((R, C // 4), tl.int64) + (row_R >> 32)[:, None]).to(tl.uint32)
    c3_RG = tl.zeros((R, C // 4), tl.uint32)
    a, b, c, d = tl.philox_impl(
        c0_RG, c1_RG, c2_RG, c3_RG, key_low.to(tl.uint32), key_high.to(tl.uint32)
    )
    # Interleaved twice the four words come to stand in order: a and c, b and d, then their pairs.
    words_RC = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    return (words_RC >> 1).to(tl.int32) >= bar


@triton.jit(do_not_specialize=["key_low", "key_high", "bar"])
def _forward(
    y_ptr, bias_ptr, residual_ptr, out_ptr, y_stride, residual_stride, rows, width,
    key_low, key_high, bar, scale,
    HAS_BIAS: tl.constexpr, DROPS: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row_R = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    column_C = tl.program_id(1) * C + tl.arange(0, C)
    row_R1, column_1C = row_R[:, None], column_C[None, :]
    inside_RC = (row_R1 < rows) & (column_1C < width)
    z_RC = tl.load(y_ptr + row_R1 * y_stride + column_1C, mask=inside_RC, other=0.0).to(tl.float32)
    if HAS_BIAS:
        bias_C = tl.load(bias_ptr + column_C, mask=column_C < width, other=0.0)
        z_RC += bias_C.to(tl.float32)[None, :]
    if DROPS:
        group_G = tl.program_id(1) * (C // 4) + tl.arange(0, C // 4)
        z_RC = tl.where(_kept(row_R, group_G, key_low, key_high, bar, R, C), z_RC * scale, 0.0)
    z_RC += tl.load(
        residual_ptr + row_R1 * residual_stride + column_1C, mask=inside_RC, other=0.0
    ).to(tl.float32)
    tl.store(
        out_ptr + row_R1 * width + column_1C, z_RC.to(out_ptr.dtype.element_ty), mask=inside_RC
    )


@triton.jit(do_not_specialize=["key_low", "key_high", "bar"])
def _backward(
    grad_ptr, dy_ptr, dbias_ptr, grad_stride, rows, width, per_program,
    key_low, key_high, bar, scale,
    HAS_BIAS: tl.constexpr, DROPS: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    column_1C = (tl.program_id(1) * C + tl.arange(0, C))[None, :]
    group_G = tl.program_id(1) * (C // 4) + tl.arange(0, C // 4)
    sum_RC = tl.zeros((R, C), tl.float32)
    for start in range(0, per_program, R):
        row_R = program * per_program + start + tl.arange(0, R)
        row_R1 = row_R[:, None]
        inside_RC = (row_R1 < rows) & (column_1C < width)
        dy_RC = tl.load(grad_ptr + row_R1 * grad_stride + column_1C, mask=inside_RC, other=0.0).to(
            tl.float32
        )
        if DROPS:
            dy_RC = tl.where(
                _kept(row_R, group_G, key_low, key_high, bar, R, C), dy_RC * scale, 0.0
            )
        tl.store(
            dy_ptr + row_R1 * width + column_1C, dy_RC.to(dy_ptr.dtype.element_ty), mask=inside_RC
        )
        sum_RC += dy_RC
    if HAS_BIAS:
        sum_1C = tl.sum(sum_RC, 0)[None, :]
        tl.store(dbias_ptr + program * width + column_1C, sum_1C, mask=column_1C < width)


def _signed(word: int) -> int:
    """Return the 32-bit number with the bits of ``word``: larger ones would be passed as 64."""
    return word - 2**32 if word >= 2**31 else word


class _BiasDropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, bias_H: Tensor | None, residual: Tensor, p: float, seed: int
    ) -> Tensor:
        assert y.shape == residual.shape, (tuple(y.shape), tuple(residual.shape))
        y_NH, residual_NH = as_rows(y), as_rows(residual)
        rows, width = y_NH.shape
        if bias_H is not None:
            check_vector(bias_H, width)
        out = torch.empty(y.shape, dtype=wider(y, residual), device=y.device)
        low, high = halves(seed)
        ctx.random = (_signed(low), _signed(high), threshold(p), 1 / (1 - p))
        ctx.switches = {"HAS_BIAS": bias_H is not None, "DROPS": p > 0}
        ctx.y_dtype, ctx.residual_dtype = y.dtype, residual.dtype
        ctx.bias_dtype = None if bias_H is None else bias_H.dtype
        if out.numel():
            tile = flat_tile(width)
            grid = triton.cdiv(rows, tile.rows), triton.cdiv(width, tile.columns)
            _forward[grid](
                y_NH, bias_H, residual_NH, out, y_NH.stride(0), residual_NH.stride(0), rows, width,
                *ctx.random, **ctx.switches, R=tile.rows, C=tile.columns, num_warps=tile.warps,
            )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dresidual = grad.to(ctx.residual_dtype)
        if not any(ctx.switches.values()):
            return grad.to(ctx.y_dtype), None, dresidual, None, None
        grad_NH = as_rows(side_by_side(grad))
        (rows, width), tile = grad_NH.shape, flat_tile(grad.shape[-1])
        per_program = tile.rows if ctx.bias_dtype is None else share(rows, tile)
        programs = triton.cdiv(rows, per_program)
        dy = torch.empty(grad.shape, dtype=ctx.y_dtype, device=grad.device)
        dbias_PH = None
        if ctx.bias_dtype is not None:
            dbias_PH = torch.empty(programs, width, dtype=torch.float32, device=grad.device)
        if dy.numel():
            _backward[(programs, triton.cdiv(width, tile.columns))](
                grad_NH, dy, dbias_PH, grad_NH.stride(0), rows, width, per_program,
                *ctx.random, **ctx.switches, R=tile.rows, C=tile.columns, num_warps=tile.warps,
            )  # fmt: skip
        dbias_H = None if dbias_PH is None else dbias_PH.sum(0).to(ctx.bias_dtype)
        return dy, dbias_H, dresidual, None, None


def bias_dropout_add(
    y_NH: Tensor, bias_H: Tensor | None, residual_NH: Tensor, p: float, seed: int
) -> Tensor:
    """Return what `kernels.dropout.bias_dropout_add_reference` returns, with the same mask.

    The last dims must be contiguous.
    """
    return _BiasDropoutAdd.apply(y_NH, bias_H, residual_NH, p, seed)  # type: ignore[no-any-return]
