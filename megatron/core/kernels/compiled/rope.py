"""Rotation of all heads in one pass; `rope.apply_rope_reference` is the reference.

Shapes: S sequence, B batch, n heads, D head size, f frequencies.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.kernels import rope
from megatron.core.kernels.compiled.arrays import cpu_kernels, is_memory, real, start, threads


def apply_rope(x_SBnD: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Return what `rope.apply_rope_reference` returns; input and tables have one dtype."""
    if not is_memory(x_SBnD):
        return rope.apply_rope(x_SBnD, cos, sin, interleaved)
    return _Rope.apply(x_SBnD, cos, sin, interleaved)  # type: ignore[no-any-return]


class _Rope(torch.autograd.Function):
    """The gradient of a rotation is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        if cos.stride(-1) != 1 or sin.stride() != cos.stride():
            cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(x, cos, sin, 1, interleaved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, -1, ctx.interleaved), None, None, None


def _rotate(x_SBnD: Tensor, cos: Tensor, sin: Tensor, sign: int, interleaved: bool) -> Tensor:
    if x_SBnD.stride(-1) != 1:
        x_SBnD = x_SBnD.contiguous()
    (S, B, n, D), f, dtype = x_SBnD.shape, cos.shape[-1], real(x_SBnD)
    y_SBnD = torch.empty_like(x_SBnD, memory_format=torch.contiguous_format)
    shape = (S, f) if cos.dim() == 2 else (S, B, f)
    cos, sin = cos.expand(shape), sin.expand(shape)
    assert cos.shape == sin.shape == shape and 2 * f <= D, f"{cos.shape} {sin.shape} of {D}"
    dtypes = (cos.dtype, sin.dtype)
    assert dtypes == (dtype, dtype) and x_SBnD.is_cpu and cos.is_cpu and sin.is_cpu, dtypes
    # Addresses of views: of queries, say, among queries, keys and values.
    cpu_kernels.rotate(
        dtype.itemsize,
        start(x_SBnD),
        x_SBnD.stride()[:3],
        start(y_SBnD),
        y_SBnD.stride()[:3],
        start(cos),
        start(sin),
        cos.stride(0),
        cos.stride(1) if cos.dim() == 3 else 0,
        *(S, B, n, D, f),
        sign,
        interleaved,
        threads(),
    )
    return y_SBnD
