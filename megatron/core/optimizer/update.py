"""What an update rule gets: ranges of flat buffers, and how to step."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron.core.optimizer.groups import Settings
from megatron.core.sharding import Sharding


@dataclass(frozen=True)
class Member:
    """The part of one parameter that lies in one range."""

    record: Sharding
    shape: tuple[int, ...]
    """Of the whole local parameter."""
    range: int
    """Number of the range."""
    place: slice
    """Elements of the range."""
    start: int
    """Offset in the flattened local parameter of the first of them."""

    @property
    def stop(self) -> int:
        """Return the offset after the last of them."""
        return self.start + (int(self.place.stop) - int(self.place.start))


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


@dataclass(frozen=True)
class Step:
    """How to update."""

    settings: Settings
    """Learning rate and decay of the group."""
    number: Tensor
    """Number of this update, from 1; fp32."""
    inverse_scale: Tensor | None
    """Divisor of the gradient, fp32; None leaves it."""
    found_nonfinite: Tensor
    """fp32; 1 leaves everything as it is."""


class UpdateRule(Protocol):
    """How ranges are updated from their gradients."""

    state_names: tuple[str, ...]

    def update(self, ranges: Ranges, step: Step) -> None:
        """Update parameters and states in place; gradients may be scaled in place.

        All tensors are of one dtype, fp32 or fp64.
        """
