"""Matrix products, with a detour for CPUs that are slow in half precision.

A CPU without AMX or the half-precision AVX-512 extensions multiplies bf16 and fp16 matrices many
times slower than fp32 ones. There a product is computed in fp32 and rounded once, which is also
what tensor cores do. That depends on the machine alone, so every call decides it (`upcast_pays`),
and the table of backends has no row for it.

Shapes: N rows (of a batch: every leading dim), I inner or input features, O output features.
"""

from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.kernels.reused import Reused

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


def matmul(a_NI: Tensor, b_IO: Tensor) -> Tensor:
    """Return a @ b in their dtype, by way of fp32 where that is quicker."""
    if not upcast_pays(a_NI.device, a_NI.dtype):
        return a_NI @ b_IO
    return (a_NI.to(torch.float32) @ b_IO.to(torch.float32)).to(a_NI.dtype)


def linear(
    x_NI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None = None,
    memory: Reused | None = None,
) -> Tensor:
    """Return x @ weight.T + bias in their dtype, by way of fp32 where that is quicker.

    Args:
        x_NI: the input.
        weight_OI: the matrix.
        bias_O: what is added, if anything.
        memory: where a large result on the CPU is to lie; autograd does not see that one made.
    """
    if not upcast_pays(x_NI.device, x_NI.dtype):
        y_NO = None
        # Of a subclass of Tensor there may be but a shape.
        if memory is not None and bias_O is None and x_NI.is_cpu and type(x_NI) is Tensor:
            y_NO = memory.take(*x_NI.shape[:-1], len(weight_OI), dtype=x_NI.dtype)
        if y_NO is None:
            return F.linear(x_NI, weight_OI, bias_O)
        torch.mm(x_NI.flatten(0, -2), weight_OI.t(), out=y_NO.flatten(0, -2))
        return y_NO
    wide_bias_O = None if bias_O is None else bias_O.to(torch.float32)
    y_NO = F.linear(x_NI.to(torch.float32), weight_OI.to(torch.float32), wide_bias_O)
    return y_NO.to(x_NI.dtype)


def accumulate_wgrad(grad_weight_OI: Tensor, grad_NO: Tensor, x_NI: Tensor) -> None:
    """Add grad.T @ x to ``grad_weight_OI``, in the buffer's dtype (fp32 under half weights).

    The product is rounded to the buffer's dtype, never to half on the way: CUDA's products of
    halves can be had in fp32, as they are summed anyway; elsewhere the factors are converted.
    """
    if grad_NO.dtype == grad_weight_OI.dtype:
        grad_weight_OI.addmm_(grad_NO.t(), x_NI)
    elif grad_NO.device.type == "cuda" and grad_weight_OI.dtype == torch.float32:
        # Not `addmm` with an out_dtype, which would save a buffer: versions of torch differ about
        # the dtype of its first argument.
        grad_weight_OI.add_(torch.mm(grad_NO.t(), x_NI, out_dtype=torch.float32))
    else:
        wide = grad_weight_OI.dtype
        grad_weight_OI.addmm_(grad_NO.t().to(wide), x_NI.to(wide))
