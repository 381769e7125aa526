"""Normalisation over the last dim: LayerNorm and RMSNorm.

With ``zero_centered`` the stored weight is the deviation from one, so that weight decay pulls
towards the identity. Statistics are taken in at least fp32; the result has the input's dtype.

Shapes: N rows (every leading dim), H hidden.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.kernels.dtypes import accumulate_dtype

WIDEST_FUSED = 16384
"""Longest row that the Triton kernels take: a program holds a whole one in registers."""


def layer_norm_reference(
    x_NH: Tensor, weight_H: Tensor, bias_H: Tensor | None, eps: float, zero_centered: bool = False
) -> Tensor:
    """Return (x - mean) / sqrt(var + eps) * weight + bias."""
    dtype = accumulate_dtype(x_NH.dtype)
    y_NH = x_NH.to(dtype)
    y_NH = y_NH - y_NH.mean(-1, keepdim=True)
    y_NH = y_NH * torch.rsqrt(y_NH.square().mean(-1, keepdim=True) + eps)
    y_NH = y_NH * (weight_H.to(dtype) + zero_centered)
    return (y_NH if bias_H is None else y_NH + bias_H).to(x_NH.dtype)


def layer_norm(
    x_NH: Tensor, weight_H: Tensor, bias_H: Tensor | None, eps: float, zero_centered: bool = False
) -> Tensor:
    """Return what `layer_norm_reference` returns, through torch's fused op."""
    gain_H = weight_H + 1 if zero_centered else weight_H
    y_NH: Tensor = F.layer_norm(x_NH, x_NH.shape[-1:], gain_H, bias_H, eps)
    return y_NH


def rms_norm_reference(
    x_NH: Tensor, weight_H: Tensor | None, eps: float, zero_centered: bool = False
) -> Tensor:
    """Return x / sqrt(mean(x**2) + eps) * weight (no weight: 1)."""
    dtype = accumulate_dtype(x_NH.dtype)
    y_NH = x_NH.to(dtype)
    y_NH = y_NH * torch.rsqrt(y_NH.square().mean(-1, keepdim=True) + eps)
    if weight_H is not None:
        y_NH = y_NH * (weight_H.to(dtype) + zero_centered)
    return y_NH.to(x_NH.dtype)


def rms_norm_torch(
    x_NH: Tensor, weight_H: Tensor | None, eps: float, zero_centered: bool = False
) -> Tensor:
    """Return what `rms_norm_reference` returns, through torch's op, which CUDA fuses."""
    gain_H = weight_H + 1 if zero_centered and weight_H is not None else weight_H
    return F.rms_norm(x_NH, x_NH.shape[-1:], gain_H, eps)


def rms_norm(
    x_NH: Tensor, weight_H: Tensor | None, eps: float, zero_centered: bool = False
) -> Tensor:
    """Return what `rms_norm_reference` returns; on CPU torch's own op takes over twice as long."""
    gain_H = weight_H + 1 if zero_centered and weight_H is not None else weight_H
    y_NH: Tensor = _RMSNorm.apply(x_NH, gain_H, eps)
    return y_NH


class _RMSNorm(torch.autograd.Function):
    """RMSNorm that saves its input and one number per row.

    With y = x * rho * w and rho = (mean(x**2) + eps) ** -1/2:

        dw = sum over rows of g * x * rho
        dx = rho * (g * w) - rho**3 * x * mean(g * w * x)
    """

    @staticmethod
    def forward(ctx: Any, x_NH: Tensor, weight_H: Tensor | None, eps: float) -> Tensor:
        wide_NH = x_NH.to(accumulate_dtype(x_NH.dtype))
        rho_N1: Tensor = torch.linalg.vector_norm(wide_NH, dim=-1, keepdim=True)
        rho_N1.square_().div_(x_NH.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x_NH, weight_H, rho_N1)
        y_NH = wide_NH * rho_N1
        return (y_NH if weight_H is None else y_NH.mul_(weight_H)).to(x_NH.dtype)

    @staticmethod
    def backward(ctx: Any, grad_NH: Tensor) -> tuple[Tensor | None, ...]:
        saved_NH, weight_H, rho_N1 = ctx.saved_tensors
        H = saved_NH.shape[-1]
        x_NH, g_NH = saved_NH.to(rho_N1.dtype).reshape(-1, H), grad_NH.reshape(-1, H)
        rho_N1 = rho_N1.reshape(-1, 1)
        gx_NH = g_NH * x_NH
        if weight_H is None:
            dw_H, w_H = None, gx_NH.new_ones(H)
        else:
            w_H = weight_H.to(rho_N1.dtype)
            # Sums over rows and over channels, as matrix-vector products.
            dw_H = (gx_NH.t() @ rho_N1).view(H).to(weight_H.dtype)
        scale_N1 = (gx_NH @ w_H)[:, None].mul_(rho_N1.pow(3)).div_(-H)
        dx_NH = torch.mul(g_NH, w_H, out=gx_NH).mul_(rho_N1).addcmul_(x_NH, scale_N1)
        return dx_NH.view(saved_NH.shape).to(saved_NH.dtype), dw_H, None
