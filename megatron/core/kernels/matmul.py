"""Matrix products, with a detour for CPUs that are slow in half precision."""

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias."""
    return F.linear(x, weight, bias)


def linear_upcast(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias, computed in fp32 and rounded to the dtype of ``x``."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    bias = None if bias is None else bias.to(dtype)
    return F.linear(x.to(dtype), weight.to(dtype), bias).to(x.dtype)
