"""One step of Adam on a flat range, written out; the rule itself is in `core.optimizer.adam`."""

from typing import NamedTuple

import torch
from torch import Tensor


class AdamStep(NamedTuple):
    """What all ranges of a step share."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    """Decay the parameter itself (Loshchilov & Hutter, 2019), not by way of the gradient."""
    number: Tensor
    """fp32 scalar: number of this update, from 1."""
    inverse_scale: Tensor | None
    """fp32 scalar: divisor of the gradient; None leaves it."""
    found_nonfinite: Tensor
    """fp32 scalar: other than 0 leaves everything as it is."""


def adam_reference(
    parameter: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: AdamStep
) -> None:
    """Update parameter and moments in place (Kingma & Ba, 2015, algorithm 1).

    Each of the four may have a dtype of its own: sums are taken in fp32, or in fp64 where one of
    them is, and rounded once. The gradient is left as it is.
    """
    if bool(step.found_nonfinite):
        return
    tensors = (parameter, grad, exp_avg, exp_avg_sq)
    wide = torch.float64 if torch.float64 in {t.dtype for t in tensors} else torch.float32
    p, g, m, v = (tensor.to(wide) for tensor in tensors)
    if step.inverse_scale is not None:
        g = g / step.inverse_scale
    if step.decoupled:
        p = p * (1 - step.lr * step.weight_decay)
    else:
        g = g + step.weight_decay * p
    m = step.beta1 * m + (1 - step.beta1) * g
    v = step.beta2 * v + (1 - step.beta2) * g * g
    number = step.number.to(torch.float64)
    first = (1 - step.beta1**number).to(wide)
    second = (1 - step.beta2**number).to(wide)
    p = p - step.lr / first * m / ((v / second).sqrt() + step.eps)
    parameter.copy_(p)
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
