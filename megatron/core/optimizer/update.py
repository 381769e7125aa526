"""What an update rule gets: ranges of flat buffers, and how to step."""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from megatron.core.distributed.pieces import Member
from megatron.core.optimizer.groups import Settings
from megatron.core.optimizer.scaled import Scaled


@dataclass(frozen=True)
class Ranges:
    """What this rank updates of one optimizer group in one buffer: one-dimensional tensors.

    The lists are equally long; element i of each is the same range of the buffer.
    """

    parameters: list[Tensor]
    """Masters, where there are."""
    grads: list[Tensor]
    states: dict[str, list[Tensor]]
    """By the names of the rule."""
    members: tuple[Member, ...]
    """Parameters that lie in the ranges, in order."""
    scaled: dict[str, list[Scaled]] = field(default_factory=dict)
    """States that are not in `states` because no rule takes them as they are kept."""


@dataclass(frozen=True)
class Signals:
    """What one step tells all groups."""

    number: Tensor
    """Number of this update, from 1; fp32."""
    inverse_scale: Tensor | None
    """Divisor of the gradient, fp32; None leaves it."""
    found_nonfinite: Tensor
    """fp32; 1 leaves everything as it is."""


@dataclass(frozen=True)
class Step(Signals):
    """How to update one group."""

    settings: Settings
    """Learning rate and decay of the group."""


def unscale(grad: Tensor, step: Step) -> tuple[Tensor, Tensor]:
    """Return a gradient divided by its scale, and 1 if the step is taken, 0 if it is refused.

    Both have the gradient's dtype; a refused gradient counts as zero, so that rules without a fused
    kernel may multiply by the second number instead of asking the device.
    """
    keep = (1 - step.found_nonfinite).to(grad.dtype)
    if step.inverse_scale is not None:
        grad = grad / step.inverse_scale
    return torch.where(keep > 0, grad, 0.0), keep


class UpdateRule(Protocol):
    """How ranges are updated from their gradients."""

    needs_whole: bool
    """See `rules`; such a rule looks at `Ranges.members`."""

    def update(self, ranges: Ranges, step: Step) -> None:
        """Update parameters and states in place; gradients may be scaled in place.

        All tensors are of one dtype, fp32 or fp64, or as `takes_as_kept` says.
        """

    def takes_as_kept(self, ranges: Ranges) -> bool:
        """Return whether `update` takes these ranges, of several dtypes, without wide copies."""
