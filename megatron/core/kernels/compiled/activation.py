"""SwiGLU in one pass each way; `activation.swiglu` is the reference.

Shapes: N rows (every leading dim), F width of the result.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.kernels.activation import swiglu_function
from megatron.core.kernels.compiled.arrays import address, cpu_kernels, threads


def swiglu(
    x: Tensor, bias: Tensor | None = None, clamp: float | None = None, offset: float = 0.0
) -> Tensor:
    """Return what `activation.swiglu` returns, saving nothing but the input."""
    x = x if bias is None else x + bias
    if clamp is not None or offset or not x.is_contiguous():
        return swiglu_function(x, None, clamp, offset)
    return _SwiGLU.apply(x)  # type: ignore[no-any-return]


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        y = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
        rows, width = _rows(y)
        cpu_kernels.swiglu(x.element_size(), address(x), address(y), rows, width, threads())
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        grad, dx = grad.contiguous(), torch.empty_like(x)
        rows, width = _rows(grad)
        arrays = (address(x), address(grad, like=x), address(dx))
        cpu_kernels.swiglu_gradient(x.element_size(), *arrays, rows, width, threads())
        return dx


def _rows(y: Tensor) -> tuple[int, int]:
    width = y.shape[-1]
    return (y.numel() // width if width else 0), width
