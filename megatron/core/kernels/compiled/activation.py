"""SwiGLU in one pass each way; `activation.swiglu` is the reference.

Shapes: N rows (every leading dim), F width of the result.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.kernels.activation import swiglu_function
from megatron.core.kernels.compiled.arrays import address, cpu_kernels, is_memory, real, threads


def swiglu(
    x: Tensor, bias: Tensor | None = None, clamp: float | None = None, offset: float = 0.0
) -> Tensor:
    """Return what `activation.swiglu` returns, saving nothing but the input."""
    x = x if bias is None else x + bias
    if clamp is not None or offset or not x.is_contiguous() or not is_memory(x):
        return swiglu_function(x, None, clamp, offset)
    return _SwiGLU.apply(x)  # type: ignore[no-any-return]


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        dtype, N, F = real(x), x.shape[:-1].numel(), x.shape[-1] // 2
        y = x.new_empty(*x.shape[:-1], F)
        arrays = (address(x, N, 2 * F, dtype=dtype), address(y, N, F, dtype=dtype))
        cpu_kernels.swiglu(dtype.itemsize, *arrays, N, F, threads())
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        grad, dx = grad.contiguous(), torch.empty_like(x)
        dtype, N, F = real(x), grad.shape[:-1].numel(), grad.shape[-1]
        cpu_kernels.swiglu_gradient(
            dtype.itemsize,
            address(x, N, 2 * F, dtype=dtype),
            address(grad, N, F, dtype=dtype),
            address(dx, N, 2 * F, dtype=dtype),
            N,
            F,
            threads(),
        )
        return dx
