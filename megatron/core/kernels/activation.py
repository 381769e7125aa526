"""Activations of a feed-forward block, plain and gated, with the bias of the layer before.

Every one has the signature ``f(x, bias=None) -> y``. A gated one reads the last dim as the gate
half and then the up half: ``y = act(gate) * (up + offset)``, with, when a clamp is set, the gate
clamped from above and the up half on both sides first.

Here each is a sequence of torch's operations, which round between them in half precision.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Callable[..., Tensor]


def gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x * Phi(x), exact."""
    return F.gelu(x if bias is None else x + bias)


def gelu_tanh(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return GELU by the tanh formula (Hendrycks and Gimpel, 2016)."""
    return F.gelu(x if bias is None else x + bias, approximate="tanh")


def quick_gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x * sigmoid(1.702 x)."""
    x = x if bias is None else x + bias
    return x * torch.sigmoid(1.702 * x)


def silu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x * sigmoid(x)."""
    return F.silu(x if bias is None else x + bias)


def relu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return max(x, 0)."""
    return F.relu(x if bias is None else x + bias)


def squared_relu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return max(x, 0) ** 2 (So et al., 2021)."""
    return F.relu(x if bias is None else x + bias).square()


def gated(
    activation: Activation,
    x: Tensor,
    bias: Tensor | None = None,
    clamp: float | None = None,
    offset: float = 0.0,
) -> Tensor:
    """Return activation(gate) * (up + offset) of the two halves of ``x + bias``."""
    gate, up = (x if bias is None else x + bias).chunk(2, -1)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return activation(gate) * (up + offset if offset else up)


def swiglu(
    x: Tensor, bias: Tensor | None = None, clamp: float | None = None, offset: float = 0.0
) -> Tensor:
    """Return silu(gate) * (up + offset) (Shazeer, 2020)."""
    return gated(silu, x, bias, clamp, offset)


def geglu(
    x: Tensor, bias: Tensor | None = None, clamp: float | None = None, offset: float = 0.0
) -> Tensor:
    """Return gelu(gate) * (up + offset)."""
    return gated(gelu, x, bias, clamp, offset)


def quick_geglu(
    x: Tensor, bias: Tensor | None = None, clamp: float | None = None, offset: float = 0.0
) -> Tensor:
    """Return quick_gelu(gate) * (up + offset)."""
    return gated(quick_gelu, x, bias, clamp, offset)


def reglu(
    x: Tensor, bias: Tensor | None = None, clamp: float | None = None, offset: float = 0.0
) -> Tensor:
    """Return relu(gate) * (up + offset)."""
    return gated(relu, x, bias, clamp, offset)


def geglu_tanh(
    x: Tensor, bias: Tensor | None = None, clamp: float | None = None, offset: float = 0.0
) -> Tensor:
    """Return gelu_tanh(gate) * (up + offset)."""
    return gated(gelu_tanh, x, bias, clamp, offset)


def swiglu_function(
    x: Tensor, bias: Tensor | None = None, clamp: float | None = None, offset: float = 0.0
) -> Tensor:
    """Return what `swiglu` returns, saving nothing but the input (torch saves silu(gate) too)."""
    x = x if bias is None else x + bias
    if clamp is not None or offset:
        return _BoundedSwiGLU.apply(x, clamp, offset)  # type: ignore[no-any-return]
    out: Tensor = _SwiGLU.apply(x)
    return out


class _BoundedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clamp: float | None, offset: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.clamp, ctx.offset = clamp, offset
        return gated(silu, x, None, clamp, offset)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = gated(silu, x, None, ctx.clamp, ctx.offset)
        return *torch.autograd.grad(y, x, grad), None, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        dx = torch.empty_like(x)
        dgate, dup = dx.chunk(2, -1)
        # Both halves are written where they belong: no concatenation.
        scratch = F.silu(gate)
        torch.mul(grad, scratch, out=dup)
        torch.mul(grad, up, out=scratch)
        torch.ops.aten.silu_backward.grad_input(scratch, gate, grad_input=dgate)
        return dx


PLAIN: dict[str, Activation] = {
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "silu": silu,
    "relu": relu,
    "squared_relu": squared_relu,
}
GATED: dict[str, Activation] = {
    "swiglu": swiglu,
    "geglu": geglu,
    "geglu_tanh": geglu_tanh,
    "quick_geglu": quick_geglu,
    "reglu": reglu,
}
REFERENCES: dict[str, Activation] = PLAIN | GATED
"""Every activation by the name configs use."""
