"""How evenly experts are loaded, as numbers for logs; pure functions of counts.

Shapes: E experts; any leading dims, such as layers.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Load(NamedTuple):
    """The load of a layer's experts."""

    imbalance: Tensor
    """Tokens of the busiest expert over the mean: 1 is even, E is all on one; 0 without tokens."""
    idle: Tensor
    """Share of the experts without a token."""
    dropped: Tensor
    """Share of the choices that full experts dropped."""


def load(counts_E: Tensor, kept: Tensor) -> Load:
    """Return how evenly experts were chosen, in fp64 scalars of the leading dims' shape.

    Args:
        counts_E: tokens that chose each expert, of all ranks that are of interest.
        kept: how many of those choices were kept, of the leading dims' shape.
    """
    counts_E, kept = counts_E.double(), kept.double()
    chosen = counts_E.sum(-1)
    mean = chosen / counts_E.shape[-1]
    some = chosen.clamp(min=1.0)
    return Load(
        imbalance=torch.where(chosen > 0, counts_E.amax(-1) / mean.clamp(min=1e-300), mean),
        idle=(counts_E == 0).double().mean(-1),
        dropped=1.0 - torch.where(chosen > 0, kept / some, torch.ones_like(some)),
    )
