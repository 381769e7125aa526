"""Normalisation over the last dim: LayerNorm, RMSNorm and the plain L2 form.

With ``zero_centered`` the stored weight is the deviation from one, so that weight decay pulls
towards the identity. Statistics are taken in at least fp32; the result has the input's dtype.
"""

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


def rms_norm_reference(
    x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool = False
) -> Tensor:
    """Return x / sqrt(mean(x**2) + eps) * weight (no weight: 1)."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    y = x.to(dtype)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * (weight.to(dtype) + zero_centered)).to(x.dtype)


def l2_norm(x: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x**2) + eps): RMSNorm without a weight."""
    return rms_norm(x, None, eps)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool = False
) -> Tensor:
    """Return (x - mean) / sqrt(var + eps) * weight + bias, through torch's fused op."""
    weight = weight + 1 if zero_centered else weight
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool = False) -> Tensor:
    """Return x / sqrt(mean(x**2) + eps) * weight."""
    return rms_norm_reference(x, weight, eps, zero_centered)
