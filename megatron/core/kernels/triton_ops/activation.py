"""Activations with the bias before them in Triton; `kernels.activation` says what they compute.

Plain: y = act(x + bias). Gated: the row is a gate and an up half, y = act(gate) * (up + offset),
the two clamped first where there is a clamp. Both save their input alone and compute in fp32. The
backward also sums the bias's gradient over the rows that a program looks at, so that the gradient
is not read a second time for it.

Shapes: N rows, F width of the result (a gated input is 2F wide), P programs; R rows and C columns
of a tile.
"""

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.kernels.triton_ops.shapes import (
    as_rows,
    check_vector,
    flat_tile,
    share,
    side_by_side,
)


@triton.jit
def _value(z, KIND: tl.constexpr):
    """Return act(z)."""
    if KIND == "gelu":
        return 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        # 0.5 (1 + tanh u) = sigmoid(2u)
        return z * tl.sigmoid(1.5957691216057308 * z * (1.0 + 0.044715 * z * z))
    elif KIND == "quick_gelu":
        return z * tl.sigmoid(1.702 * z)
    elif KIND == "silu":
        return z * tl.sigmoid(z)
    elif KIND == "relu":
        return tl.maximum(z, 0.0)
    else:
        tl.static_assert(KIND == "squared_relu")
        positive = tl.maximum(z, 0.0)
        return positive * positive


@triton.jit
def _slope(z, KIND: tl.constexpr):
    """Return the derivative of act at z."""
    if KIND == "gelu":
        density = 0.3989422804014327 * tl.exp(-0.5 * z * z)
        return 0.5 * (1.0 + tl.erf(z * 0.7071067811865476)) + z * density
    elif KIND == "gelu_tanh":
        s = tl.sigmoid(1.5957691216057308 * z * (1.0 + 0.044715 * z * z))
        return s + z * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * z * z)
    elif KIND == "quick_gelu":
        s = tl.sigmoid(1.702 * z)
        return s + 1.702 * z * s * (1.0 - s)
    elif KIND == "silu":
        s = tl.sigmoid(z)
        return s + z * s * (1.0 - s)
    elif KIND == "relu":
        return tl.where(z > 0.0, 1.0, 0.0)
    else:
        tl.static_assert(KIND == "squared_relu")
        return 2.0 * tl.maximum(z, 0.0)


@triton.jit
def _load(x_ptr, bias_ptr, row_R1, column_1C, stride, inside_RC, HAS_BIAS: tl.constexpr):
    z_RC = tl.load(x_ptr + row_R1 * stride + column_1C, mask=inside_RC, other=0.0).to(tl.float32)
    if HAS_BIAS:
        z_RC += tl.load(bias_ptr + column_1C).to(tl.float32)
    return z_RC


@triton.jit
def _plain_forward(
    x_ptr, bias_ptr, y_ptr, x_stride, rows, width,
    KIND: tl.constexpr, HAS_BIAS: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row_R1 = (tl.program_id(0).to(tl.int64) * R + tl.arange(0, R))[:, None]
    column_1C = (tl.program_id(1) * C + tl.arange(0, C))[None, :]
    inside_RC = (row_R1 < rows) & (column_1C < width)
    # Columns beyond the end read the last one's bias and are not stored.
    safe_1C = tl.minimum(column_1C, width - 1)
    z_RC = _load(x_ptr, bias_ptr, row_R1, safe_1C, x_stride, inside_RC, HAS_BIAS)
    y_RC = _value(z_RC, KIND)
    tl.store(y_ptr + row_R1 * width + column_1C, y_RC.to(y_ptr.dtype.element_ty), mask=inside_RC)


@triton.jit
def _plain_backward(
    grad_ptr, x_ptr, bias_ptr, dx_ptr, dbias_ptr, grad_stride, x_stride, rows, width, per_program,
    KIND: tl.constexpr, HAS_BIAS: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    column_1C = (tl.program_id(1) * C + tl.arange(0, C))[None, :]
    safe_1C = tl.minimum(column_1C, width - 1)
    sum_RC = tl.zeros((R, C), tl.float32)
    for start in range(0, per_program, R):
        row_R1 = (program * per_program + start + tl.arange(0, R))[:, None]
        inside_RC = (row_R1 < rows) & (column_1C < width)
        z_RC = _load(x_ptr, bias_ptr, row_R1, safe_1C, x_stride, inside_RC, HAS_BIAS)
        grad_RC = tl.load(
            grad_ptr + row_R1 * grad_stride + column_1C, mask=inside_RC, other=0.0
        ).to(tl.float32)
        dx_RC = grad_RC * _slope(z_RC, KIND)
        tl.store(
            dx_ptr + row_R1 * width + column_1C, dx_RC.to(dx_ptr.dtype.element_ty), mask=inside_RC
        )
        sum_RC += dx_RC
    if HAS_BIAS:
        sum_1C = tl.sum(sum_RC, 0)[None, :]
        tl.store(dbias_ptr + program * width + column_1C, sum_1C, mask=column_1C < width)


@triton.jit
def _gated_forward(
    x_ptr, bias_ptr, y_ptr, x_stride, rows, width, clamp, offset,
    KIND: tl.constexpr, HAS_BIAS: tl.constexpr, CLAMPED: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row_R1 = (tl.program_id(0).to(tl.int64) * R + tl.arange(0, R))[:, None]
    column_1C = (tl.program_id(1) * C + tl.arange(0, C))[None, :]
    inside_RC = (row_R1 < rows) & (column_1C < width)
    safe_1C = tl.minimum(column_1C, width - 1)
    gate_RC = _load(x_ptr, bias_ptr, row_R1, safe_1C, x_stride, inside_RC, HAS_BIAS)
    up_RC = _load(x_ptr, bias_ptr, row_R1, safe_1C + width, x_stride, inside_RC, HAS_BIAS)
    if CLAMPED:
        gate_RC = tl.minimum(gate_RC, clamp)
        up_RC = tl.minimum(tl.maximum(up_RC, -clamp), clamp)
    y_RC = _value(gate_RC, KIND) * (up_RC + offset)
    tl.store(y_ptr + row_R1 * width + column_1C, y_RC.to(y_ptr.dtype.element_ty), mask=inside_RC)


@triton.jit
def _gated_backward(
    grad_ptr, x_ptr, bias_ptr, dx_ptr, dbias_ptr, grad_stride, x_stride, rows, width, per_program,
    clamp, offset,
    KIND: tl.constexpr, HAS_BIAS: tl.constexpr, CLAMPED: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    column_1C = (tl.program_id(1) * C + tl.arange(0, C))[None, :]
    safe_1C = tl.minimum(column_1C, width - 1)
    dgate_sum_RC = tl.zeros((R, C), tl.float32)
    dup_sum_RC = tl.zeros((R, C), tl.float32)
    for start in range(0, per_program, R):
        row_R1 = (program * per_program + start + tl.arange(0, R))[:, None]
        inside_RC = (row_R1 < rows) & (column_1C < width)
        gate_RC = _load(x_ptr, bias_ptr, row_R1, safe_1C, x_stride, inside_RC, HAS_BIAS)
        up_RC = _load(x_ptr, bias_ptr, row_R1, safe_1C + width, x_stride, inside_RC, HAS_BIAS)
        grad_RC = tl.load(
            grad_ptr + row_R1 * grad_stride + column_1C, mask=inside_RC, other=0.0
        ).to(tl.float32)
        gate_moves_RC = inside_RC
        up_moves_RC = inside_RC
        if CLAMPED:
            # As torch's clamp: a value on the bound still moves.
            gate_moves_RC = gate_RC <= clamp
            up_moves_RC = (up_RC <= clamp) & (up_RC >= -clamp)
            gate_RC = tl.minimum(gate_RC, clamp)
            up_RC = tl.minimum(tl.maximum(up_RC, -clamp), clamp)
        dgate_RC = grad_RC * (up_RC + offset) * _slope(gate_RC, KIND)
        dup_RC = grad_RC * _value(gate_RC, KIND)
        if CLAMPED:
            dgate_RC = tl.where(gate_moves_RC, dgate_RC, 0.0)
            dup_RC = tl.where(up_moves_RC, dup_RC, 0.0)
        at_RC = dx_ptr + row_R1 * (2 * width) + column_1C
        tl.store(at_RC, dgate_RC.to(dx_ptr.dtype.element_ty), mask=inside_RC)
        tl.store(at_RC + width, dup_RC.to(dx_ptr.dtype.element_ty), mask=inside_RC)
        dgate_sum_RC += dgate_RC
        dup_sum_RC += dup_RC
    if HAS_BIAS:
        at_1C = dbias_ptr + program * (2 * width) + column_1C
        tl.store(at_1C, tl.sum(dgate_sum_RC, 0)[None, :], mask=column_1C < width)
        tl.store(at_1C + width, tl.sum(dup_sum_RC, 0)[None, :], mask=column_1C < width)


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        kind: str,
        gated: bool,
        clamp: float | None,
        offset: float,
    ) -> Tensor:
        rows = as_rows(x)
        width = x.shape[-1] // 2 if gated else x.shape[-1]
        assert not gated or x.shape[-1] == 2 * width, f"{x.shape[-1]} channels have no halves"
        if bias is not None:
            check_vector(bias, x.shape[-1])
        y = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
        ctx.save_for_backward(x, bias)
        ctx.gated, ctx.width = gated, width
        ctx.switches = {"KIND": kind, "HAS_BIAS": bias is not None}
        ctx.numbers = ()
        if gated:
            ctx.switches["CLAMPED"] = clamp is not None
            ctx.numbers = (0.0 if clamp is None else clamp, offset)
        if y.numel():
            tile = flat_tile(width)
            grid = triton.cdiv(rows.shape[0], tile.rows), triton.cdiv(width, tile.columns)
            (_gated_forward if gated else _plain_forward)[grid](
                rows, bias, y, rows.stride(0), rows.shape[0], width, *ctx.numbers,
                **ctx.switches, R=tile.rows, C=tile.columns, num_warps=tile.warps,
            )  # fmt: skip
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        rows, grads = as_rows(x), as_rows(side_by_side(grad))
        tile = flat_tile(ctx.width)
        # Without a bias nothing is summed over rows.
        per_program = tile.rows if bias is None else share(rows.shape[0], tile)
        programs = triton.cdiv(rows.shape[0], per_program)
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        partial = None
        if bias is not None:
            partial = torch.empty(programs, x.shape[-1], dtype=torch.float32, device=x.device)
        if dx.numel():
            grid = programs, triton.cdiv(ctx.width, tile.columns)
            (_gated_backward if ctx.gated else _plain_backward)[grid](
                grads, rows, bias, dx, partial, grads.stride(0), rows.stride(0), rows.shape[0],
                ctx.width, per_program, *ctx.numbers,
                **ctx.switches, R=tile.rows, C=tile.columns, num_warps=tile.warps,
            )  # fmt: skip
        dbias = None if partial is None else partial.sum(0).to(bias.dtype)
        return dx, dbias, None, None, None, None


def _plain(kind: str, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return _Activation.apply(x, bias, kind, False, None, 0.0)  # type: ignore[no-any-return]


def _gated(
    kind: str,
    x: Tensor,
    bias: Tensor | None = None,
    clamp: float | None = None,
    offset: float = 0.0,
) -> Tensor:
    return _Activation.apply(x, bias, kind, True, clamp, offset)  # type: ignore[no-any-return]


# The activations of `kernels.activation`, with its signatures; the last dim must be contiguous.
gelu = partial(_plain, "gelu")
gelu_tanh = partial(_plain, "gelu_tanh")
quick_gelu = partial(_plain, "quick_gelu")
silu = partial(_plain, "silu")
relu = partial(_plain, "relu")
squared_relu = partial(_plain, "squared_relu")
swiglu = partial(_gated, "silu")
geglu = partial(_gated, "gelu")
geglu_tanh = partial(_gated, "gelu_tanh")
quick_geglu = partial(_gated, "quick_gelu")
reglu = partial(_gated, "relu")
