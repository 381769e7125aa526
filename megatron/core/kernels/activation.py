"""Activations of a feed-forward block, plain and gated, with the bias of the layer before.

Every one has the signature ``f(x, bias=None) -> y``. A gated one reads the last dim as the gate
half and then the up half: ``y = act(gate) * (up + offset)``, with, when a clamp is set, the gate
clamped from above and the up half on both sides first.
"""

from collections.abc import Callable
from functools import partial

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


PLAIN: dict[str, Activation] = {
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "silu": silu,
    "relu": relu,
    "squared_relu": squared_relu,
}
GATED: dict[str, Activation] = {
    "gelu": geglu,
    "gelu_tanh": partial(gated, gelu_tanh),
    "quick_gelu": quick_geglu,
    "silu": swiglu,
    "relu": partial(gated, relu),
}
"""The gated unit of each plain activation; both kinds take (x, bias), these clamp and offset too."""
