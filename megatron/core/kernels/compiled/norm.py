"""RMSNorm in one pass over each row; `norm.rms_norm_reference` is the reference.

Shapes: N rows (every leading dim), H hidden.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.kernels import norm
from megatron.core.kernels.compiled.arrays import address, cpu_kernels, is_memory, real, threads


def rms_norm(
    x_NH: Tensor, weight_H: Tensor | None, eps: float, zero_centered: bool = False
) -> Tensor:
    """Return what `norm.rms_norm_reference` returns; input and gains have one dtype."""
    if not x_NH.is_contiguous() or not is_memory(x_NH):
        # Heads cut out of a wider row: a copy would be one more tensor that backward keeps.
        return norm.rms_norm(x_NH, weight_H, eps, zero_centered)
    gain_H = weight_H + 1 if zero_centered and weight_H is not None else weight_H
    gain_H = None if gain_H is None else gain_H.contiguous()
    return _RMSNorm.apply(x_NH, gain_H, eps)  # type: ignore[no-any-return]


class _RMSNorm(torch.autograd.Function):
    """Saves its input and one number per row."""

    @staticmethod
    def forward(ctx: Any, x_NH: Tensor, weight_H: Tensor | None, eps: float) -> Tensor:
        dtype, N, H = real(x_NH), x_NH.shape[:-1].numel(), x_NH.shape[-1]
        y_NH, rho_N = torch.empty_like(x_NH), x_NH.new_empty(x_NH.shape[:-1])
        cpu_kernels.rms_norm(
            dtype.itemsize,
            address(x_NH, N, H, dtype=dtype),
            address(weight_H, H, dtype=dtype),
            address(y_NH, N, H, dtype=dtype),
            address(rho_N, N, dtype=dtype),
            N,
            H,
            eps,
            threads(),
        )
        ctx.save_for_backward(x_NH, weight_H, rho_N)
        return y_NH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NH: Tensor) -> tuple[Tensor | None, ...]:
        x_NH, weight_H, rho_N = ctx.saved_tensors
        grad_NH, dx_NH = grad_NH.contiguous(), torch.empty_like(x_NH)
        dw_H = None if weight_H is None else torch.empty_like(weight_H)
        dtype, N, H = real(x_NH), x_NH.shape[:-1].numel(), x_NH.shape[-1]
        cpu_kernels.rms_norm_gradient(
            dtype.itemsize,
            address(x_NH, N, H, dtype=dtype),
            address(grad_NH, N, H, dtype=dtype),
            address(weight_H, H, dtype=dtype),
            address(rho_N, N, dtype=dtype),
            address(dx_NH, N, H, dtype=dtype),
            address(dw_H, H, dtype=dtype),
            N,
            H,
            threads(),
        )
        return dx_NH, dw_H, None
