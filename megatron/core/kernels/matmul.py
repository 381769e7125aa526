"""Matrix products, with a detour for CPUs that are slow in half precision.

A CPU without AMX or the half-precision AVX-512 extensions multiplies bf16 and fp16 matrices many
times slower than fp32 ones. There the ``upcast`` backend computes in fp32 and rounds once, which
is also what tensor cores do.
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FAST = {
    torch.bfloat16: {"amx_bf16", "avx512_bf16", "bf16", "svebf16"},
    torch.float16: {"amx_fp16", "avx512_fp16", "fphp"},
}
"""CPU features that make a half-precision product worth while, as Linux names them."""


@cache
def cpu_features() -> frozenset[str]:
    """Return the feature flags of this machine's CPU; empty where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    names = ("flags", "Features")
    words = [line.partition(":")[2].split() for line in lines if line.startswith(names)]
    return frozenset(words[0]) if words else frozenset()


def upcast_pays(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether products of ``dtype`` are slow on ``device``."""
    return device.type == "cpu" and dtype in FAST and not FAST[dtype] & cpu_features()


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in their dtype, by way of fp32 where that is quicker."""
    if not upcast_pays(a.device, a.dtype):
        return a @ b
    return (a.to(torch.float32) @ b.to(torch.float32)).to(a.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias, by the quicker of the two backends below."""
    backend = linear_upcast if upcast_pays(x.device, x.dtype) else linear_torch
    return backend(x, weight, bias)


def linear_torch(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias."""
    return F.linear(x, weight, bias)


def linear_upcast(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias, computed in at least fp32 and rounded to the dtype of ``x``."""
    out: Tensor = _UpcastLinear.apply(x, weight, bias)
    return out


class _UpcastLinear(torch.autograd.Function):
    """Saves its arguments in their own dtype, not the fp32 copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        dtype = torch.promote_types(x.dtype, torch.float32)
        wide_bias = None if bias is None else bias.to(dtype)
        return F.linear(x.to(dtype), weight.to(dtype), wide_bias).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dtype = torch.promote_types(x.dtype, torch.float32)
        g = grad.to(dtype)
        rows = g.reshape(-1, g.shape[-1])
        dx = (g @ weight.to(dtype)).to(x.dtype) if ctx.needs_input_grad[0] else None
        dw = db = None
        if ctx.needs_input_grad[1]:
            dw = (rows.t() @ x.reshape(-1, x.shape[-1]).to(dtype)).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            db = rows.sum(0).to(ctx.bias_dtype)
        return dx, dw, db


def accumulate_wgrad(grad_weight: Tensor, grad_out: Tensor, x: Tensor) -> None:
    """Add grad_out.T @ x to ``grad_weight``, in the buffer's dtype (fp32 under half weights).

    Leading dims of ``grad_out`` and ``x`` are flattened.
    """
    g, x = (t.reshape(-1, t.shape[-1]) for t in (grad_out, x))
    if g.dtype == grad_weight.dtype:
        grad_weight.addmm_(g.t(), x)
    elif g.device.type == "cpu":
        grad_weight.addmm_(g.t().to(grad_weight.dtype), x.to(grad_weight.dtype))
    else:
        grad_weight.add_(g.t() @ x)
