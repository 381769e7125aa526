"""LayerNorm and RMSNorm in Triton, forward and backward; `kernels.norm` says what they compute.

A program of the forward takes a tile of whole rows, and keeps one or two fp32 numbers per row. With
xhat = (x - mean) * rho and g = grad * gain the backward is

    dx = rho * (g - mean(g) - xhat * mean(g * xhat))        RMSNorm: without mean(g)
    dgain = sum over rows of grad * xhat                    dbias = sum over rows of grad

where each program sums the gains' part over its share of the rows; torch adds up the shares. The
sums of a row longer than `SUMMED_ROW` do not fit registers beside the row: such a row is read
twice, a piece at a time, and a second kernel takes the sums over rows.

Shapes: N rows, H hidden, P programs; R rows and C columns of a tile.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.kernels.triton_ops.shapes import (
    as_rows,
    check_vector,
    flat_tile,
    row_tile,
    share,
    side_by_side,
)

SUMMED_ROW = 8192
"""Longest row, of a tile, with which a program also sums the gains' gradients."""


@triton.jit
def _load_gains(gain_ptr, column_C, width, HAS_GAIN: tl.constexpr, FROM_ONE: tl.constexpr):
    gain_C = tl.full(column_C.shape, 1.0, tl.float32)
    if HAS_GAIN:
        gain_C = tl.load(gain_ptr + column_C, mask=column_C < width, other=0.0).to(tl.float32)
        if FROM_ONE:
            gain_C += 1.0
    return gain_C


@triton.jit
def _forward(
    x_ptr, gain_ptr, bias_ptr, y_ptr, mean_ptr, rho_ptr, x_stride, rows, width, eps,
    CENTRED: tl.constexpr, HAS_GAIN: tl.constexpr, HAS_BIAS: tl.constexpr, FROM_ONE: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row_R = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    column_C = tl.arange(0, C)
    inside_RC = (row_R < rows)[:, None] & (column_C < width)[None, :]
    x_RC = tl.load(
        x_ptr + row_R[:, None] * x_stride + column_C[None, :], mask=inside_RC, other=0.0
    ).to(tl.float32)
    if CENTRED:
        mean_R = tl.sum(x_RC, 1) / width
        tl.store(mean_ptr + row_R, mean_R, mask=row_R < rows)
        # Beyond the row's end there is nothing to add to the variance.
        x_RC = tl.where(inside_RC, x_RC - mean_R[:, None], 0.0)
    rho_R = 1.0 / tl.sqrt(tl.sum(x_RC * x_RC, 1) / width + eps)
    tl.store(rho_ptr + row_R, rho_R, mask=row_R < rows)
    y_RC = x_RC * rho_R[:, None]
    if HAS_GAIN:
        y_RC *= _load_gains(gain_ptr, column_C, width, HAS_GAIN, FROM_ONE)[None, :]
    if HAS_BIAS:
        bias_C = tl.load(bias_ptr + column_C, mask=column_C < width, other=0.0).to(tl.float32)
        y_RC += bias_C[None, :]
    tl.store(
        y_ptr + row_R[:, None] * width + column_C[None, :],
        y_RC.to(y_ptr.dtype.element_ty),
        mask=inside_RC,
    )


@triton.jit
def _backward(
    grad_ptr, x_ptr, gain_ptr, mean_ptr, rho_ptr, dx_ptr, dgain_ptr, dbias_ptr,
    grad_stride, x_stride, rows, width, per_program,
    CENTRED: tl.constexpr, HAS_GAIN: tl.constexpr, HAS_BIAS: tl.constexpr, FROM_ONE: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    column_C = tl.arange(0, C)
    gain_C = _load_gains(gain_ptr, column_C, width, HAS_GAIN, FROM_ONE)
    dgain_RC = tl.zeros((R, C), tl.float32)
    dbias_RC = tl.zeros((R, C), tl.float32)
    for start in range(0, per_program, R):
        row_R = program * per_program + start + tl.arange(0, R)
        inside_RC = (row_R < rows)[:, None] & (column_C < width)[None, :]
        at_RC = column_C[None, :]
        grad_RC = tl.load(
            grad_ptr + row_R[:, None] * grad_stride + at_RC, mask=inside_RC, other=0.0
        ).to(tl.float32)
        x_RC = tl.load(x_ptr + row_R[:, None] * x_stride + at_RC, mask=inside_RC, other=0.0)
        rho_R = tl.load(rho_ptr + row_R, mask=row_R < rows, other=0.0)
        xhat_RC = x_RC.to(tl.float32)
        if CENTRED:
            mean_R = tl.load(mean_ptr + row_R, mask=row_R < rows, other=0.0)
            xhat_RC = tl.where(inside_RC, xhat_RC - mean_R[:, None], 0.0)
        xhat_RC *= rho_R[:, None]
        g_RC = grad_RC * gain_C[None, :]
        dx_RC = g_RC - xhat_RC * (tl.sum(g_RC * xhat_RC, 1) / width)[:, None]
        if CENTRED:
            dx_RC -= (tl.sum(g_RC, 1) / width)[:, None]
        dx_RC *= rho_R[:, None]
        tl.store(
            dx_ptr + row_R[:, None] * width + at_RC,
            dx_RC.to(dx_ptr.dtype.element_ty),
            mask=inside_RC,
        )
        if HAS_GAIN:
            dgain_RC += grad_RC * xhat_RC
        if HAS_BIAS:
            dbias_RC += grad_RC
    if HAS_GAIN:
        tl.store(dgain_ptr + program * width + column_C, tl.sum(dgain_RC, 0), mask=column_C < width)
    if HAS_BIAS:
        tl.store(dbias_ptr + program * width + column_C, tl.sum(dbias_RC, 0), mask=column_C < width)


@triton.jit
def _long_backward(
    grad_ptr, x_ptr, gain_ptr, mean_ptr, rho_ptr, dx_ptr, grad_stride, x_stride, width,
    CENTRED: tl.constexpr, HAS_GAIN: tl.constexpr, FROM_ONE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    grad_ptr += row * grad_stride
    x_ptr += row * x_stride
    rho = tl.load(rho_ptr + row)
    mean = 0.0
    if CENTRED:
        mean = tl.load(mean_ptr + row)
    inner_C = tl.zeros((C,), tl.float32)
    sum_C = tl.zeros((C,), tl.float32)
    for start in range(0, width, C):
        column_C = start + tl.arange(0, C)
        inside_C = column_C < width
        g_C = tl.load(grad_ptr + column_C, mask=inside_C, other=0.0).to(tl.float32)
        g_C *= _load_gains(gain_ptr, column_C, width, HAS_GAIN, FROM_ONE)
        x_C = tl.load(x_ptr + column_C, mask=inside_C, other=0.0).to(tl.float32)
        # Outside of the row g is zero.
        inner_C += g_C * (x_C - mean) * rho
        sum_C += g_C
    inner = tl.sum(inner_C, 0) / width
    shift = 0.0
    if CENTRED:
        shift = tl.sum(sum_C, 0) / width
    for start in range(0, width, C):
        column_C = start + tl.arange(0, C)
        inside_C = column_C < width
        g_C = tl.load(grad_ptr + column_C, mask=inside_C, other=0.0).to(tl.float32)
        g_C *= _load_gains(gain_ptr, column_C, width, HAS_GAIN, FROM_ONE)
        x_C = tl.load(x_ptr + column_C, mask=inside_C, other=0.0).to(tl.float32)
        dx_C = rho * (g_C - shift - (x_C - mean) * rho * inner)
        tl.store(dx_ptr + row * width + column_C, dx_C.to(dx_ptr.dtype.element_ty), mask=inside_C)


@triton.jit
def _gains(
    grad_ptr, x_ptr, mean_ptr, rho_ptr, dgain_ptr, dbias_ptr,
    grad_stride, x_stride, rows, width, per_program,
    CENTRED: tl.constexpr, HAS_BIAS: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    column_1C = (tl.program_id(1) * C + tl.arange(0, C))[None, :]
    dgain_RC = tl.zeros((R, C), tl.float32)
    dbias_RC = tl.zeros((R, C), tl.float32)
    for start in range(0, per_program, R):
        row_R1 = (program * per_program + start + tl.arange(0, R))[:, None]
        inside_RC = (row_R1 < rows) & (column_1C < width)
        grad_RC = tl.load(
            grad_ptr + row_R1 * grad_stride + column_1C, mask=inside_RC, other=0.0
        ).to(tl.float32)
        xhat_RC = tl.load(x_ptr + row_R1 * x_stride + column_1C, mask=inside_RC, other=0.0).to(
            tl.float32
        )
        if CENTRED:
            xhat_RC -= tl.load(mean_ptr + row_R1, mask=row_R1 < rows, other=0.0)
        xhat_RC *= tl.load(rho_ptr + row_R1, mask=row_R1 < rows, other=0.0)
        # Outside of the tensor the gradient is zero.
        dgain_RC += grad_RC * xhat_RC
        dbias_RC += grad_RC
    at_1C = program * width + column_1C
    tl.store(dgain_ptr + at_1C, tl.sum(dgain_RC, 0)[None, :], mask=column_1C < width)
    if HAS_BIAS:
        tl.store(dbias_ptr + at_1C, tl.sum(dbias_RC, 0)[None, :], mask=column_1C < width)


class _Norm(torch.autograd.Function):
    """Either norm; saves its input, the gains and the statistics of each row."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gain_H: Tensor | None,
        bias_H: Tensor | None,
        eps: float,
        zero_centred: bool,
        centred: bool,
    ) -> Tensor:
        x_NH = as_rows(x)
        rows, width = x_NH.shape
        for vector in (gain_H, bias_H):
            if vector is not None:
                check_vector(vector, width)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rho_N = torch.empty(rows, dtype=torch.float32, device=x.device)
        mean_N = torch.empty_like(rho_N) if centred else None
        ctx.switches = {
            "CENTRED": centred,
            "HAS_GAIN": gain_H is not None,
            "HAS_BIAS": bias_H is not None,
            "FROM_ONE": zero_centred,
        }
        ctx.tile = tile = row_tile(width)
        if rows:
            _forward[(triton.cdiv(rows, tile.rows),)](
                x_NH, gain_H, bias_H, y, mean_N, rho_N, x_NH.stride(0), rows, width, eps,
                **ctx.switches, R=tile.rows, C=tile.columns, num_warps=tile.warps,
            )  # fmt: skip
        ctx.save_for_backward(x, gain_H, mean_N, rho_N)
        ctx.bias_dtype = None if bias_H is None else bias_H.dtype
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gain_H, mean_N, rho_N = ctx.saved_tensors
        x_NH, grad_NH = as_rows(x), as_rows(side_by_side(grad))
        (rows, width), tile = x_NH.shape, ctx.tile
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        is_long = tile.columns > SUMMED_ROW
        if is_long:
            tile = flat_tile(width)
        per_program = share(rows, tile)
        programs = triton.cdiv(rows, per_program)
        partial = {"dtype": torch.float32, "device": x.device}
        dgain_PH = None if gain_H is None else torch.empty(programs, width, **partial)
        dbias_PH = None if ctx.bias_dtype is None else torch.empty(programs, width, **partial)
        strides, switches = (grad_NH.stride(0), x_NH.stride(0)), dict(ctx.switches)
        shape = {"R": tile.rows, "C": tile.columns, "num_warps": tile.warps}
        if rows and not is_long:
            _backward[(programs,)](
                grad_NH, x_NH, gain_H, mean_N, rho_N, dx, dgain_PH, dbias_PH, *strides, rows,
                width, per_program, **switches, **shape,
            )  # fmt: skip
        elif rows:
            biased = switches.pop("HAS_BIAS")
            _long_backward[(rows,)](
                grad_NH, x_NH, gain_H, mean_N, rho_N, dx, *strides, width, **switches,
                C=tile.columns, num_warps=tile.warps,
            )  # fmt: skip
            if gain_H is not None:
                _gains[(programs, triton.cdiv(width, tile.columns))](
                    grad_NH, x_NH, mean_N, rho_N, dgain_PH, dbias_PH, *strides, rows, width,
                    per_program, CENTRED=switches["CENTRED"], HAS_BIAS=biased, **shape,
                )  # fmt: skip
        dgain_H = None if dgain_PH is None else dgain_PH.sum(0).to(gain_H.dtype)
        dbias_H = None if dbias_PH is None else dbias_PH.sum(0).to(ctx.bias_dtype)
        return dx, dgain_H, dbias_H, None, None, None


def layer_norm(
    x_NH: Tensor, weight_H: Tensor, bias_H: Tensor | None, eps: float, zero_centered: bool = False
) -> Tensor:
    """Return what `kernels.norm.layer_norm_reference` returns.

    The last dim must be contiguous, and at most `kernels.norm.WIDEST_FUSED` long.
    """
    return _Norm.apply(x_NH, weight_H, bias_H, eps, zero_centered, True)  # type: ignore[no-any-return]


def rms_norm(
    x_NH: Tensor, weight_H: Tensor | None, eps: float, zero_centered: bool = False
) -> Tensor:
    """Return what `kernels.norm.rms_norm_reference` returns; demands on ``x_NH`` as above."""
    return _Norm.apply(x_NH, weight_H, None, eps, zero_centered, False)  # type: ignore[no-any-return]
