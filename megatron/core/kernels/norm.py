"""Normalisation over the last dim: LayerNorm, RMSNorm and the plain L2 form.

With ``zero_centered`` the stored weight is the deviation from one, so that weight decay pulls
towards the identity. Statistics are taken in at least fp32; the result has the input's dtype.

Shapes: N rows (every leading dim), H hidden.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def layer_norm_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool = False
) -> Tensor:
    """Return (x - mean) / sqrt(var + eps) * weight + bias."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    y = x.to(dtype)
    y = y - y.mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    y = y * (weight.to(dtype) + zero_centered)
    return (y if bias is None else y + bias).to(x.dtype)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool = False
) -> Tensor:
    """Return what `layer_norm_reference` returns, through torch's fused op."""
    weight = weight + 1 if zero_centered else weight
    out: Tensor = F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return out


def rms_norm_reference(
    x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool = False
) -> Tensor:
    """Return x / sqrt(mean(x**2) + eps) * weight (no weight: 1)."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    y = x.to(dtype)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * (weight.to(dtype) + zero_centered)).to(x.dtype)


def rms_norm_torch(
    x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool = False
) -> Tensor:
    """Return what `rms_norm_reference` returns, through torch's op, which CUDA fuses."""
    weight = weight + 1 if zero_centered and weight is not None else weight
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool = False) -> Tensor:
    """Return what `rms_norm_reference` returns; on CPU torch's own op takes over twice as long."""
    weight = weight + 1 if zero_centered and weight is not None else weight
    out: Tensor = _RMSNorm.apply(x, weight, eps)
    return out


def l2_norm(x: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x**2) + eps): RMSNorm without a weight."""
    return rms_norm(x, None, eps)


class _RMSNorm(torch.autograd.Function):
    """RMSNorm that saves its input and one number per row.

    With y = x * rho * w and rho = (mean(x**2) + eps) ** -1/2:

        dw = sum over rows of g * x * rho
        dx = rho * (g * w) - rho**3 * x * mean(g * w * x)
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        rho: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        rho.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rho)
        y = wide * rho
        return (y if weight is None else y.mul_(weight)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, weight, rho = ctx.saved_tensors
        H = saved.shape[-1]
        x, g, rho_N1 = saved.to(rho.dtype).reshape(-1, H), grad.reshape(-1, H), rho.reshape(-1, 1)
        gx_NH = g * x
        if weight is None:
            dw, w = None, gx_NH.new_ones(H)
        else:
            w = weight.to(rho.dtype)
            # Sums over rows and over channels, as matrix-vector products.
            dw = (gx_NH.t() @ rho_N1).view(H).to(weight.dtype)
        scale_N1 = (gx_NH @ w)[:, None].mul_(rho_N1.pow(3)).div_(-H)
        dx = torch.mul(g, w, out=gx_NH).mul_(rho_N1).addcmul_(x, scale_N1)
        return dx.view(saved.shape).to(saved.dtype), dw, None
