"""When the tests of Triton kernels can run, and how they compare."""

import importlib.util
import os
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = pytest.mark.skipif(
    not (HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"),
    reason="needs Triton beside torch, and TRITON_INTERPRET=1: `make test-kernels` brings both",
)
"""Mark of tests that run kernels on CPU tensors."""

F64 = torch.float64
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Half the distance of neighbours, relative; of fp32 the whole one, since sums are fp32 too."""


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return random numbers in float64 that ``dtype`` can hold."""
    return torch.randn(*shape, dtype=F64).to(dtype).to(F64)


def compare(
    ours: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
    terms: int = 1,
) -> None:
    """Compare value and gradients: ours in ``dtype`` and the reference in float64.

    An element may be off by a few roundings of itself, and of the largest of its kind: where a sum
    cancels, what is lost is lost of its terms. Errors of ``terms`` numbers that are summed over
    rows grow like the root of how many they are.
    """
    results = []
    for function, kind in ((ours, dtype), (reference, F64)):
        here = [x.detach().clone().to(kind).requires_grad_() for x in inputs]
        out = function(*here)
        assert out.dtype == kind
        if not results:
            grad = drawn(*out.shape, dtype=dtype)
        results.append([out, *torch.autograd.grad(out, here, grad.to(kind))])
    for number, (got, want) in enumerate(zip(*results, strict=True)):
        name = f"gradient {number}" if number else "value"
        close(got, want, dtype, name, 1.0 if got.dim() > 1 else terms**0.5)


def close(
    got: Tensor, want: Tensor, dtype: torch.dtype, name: str = "value", growth: float = 1.0
) -> None:
    """Compare a tensor with what it should be, in roundings of ``dtype``."""
    step = 4 * ROUNDING[dtype]
    atol = step * growth * want.detach().abs().amax().item()
    torch.testing.assert_close(
        got.to(F64), want.to(F64), rtol=step, atol=atol, msg=lambda m: f"{name}: {m}"
    )
