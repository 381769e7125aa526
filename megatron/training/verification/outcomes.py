"""What came out of a layout, put together from its ranks, and compared with another outcome.

Ranks hold boxes of logical tensors (`core.sharding`). `join` lays the boxes of all ranks beside
each other, so that an outcome has one number for each element of the model, whoever held it; where
several ranks hold the same element it notes how far they are apart.

Tensors are compared as a whole: the largest difference in a tensor, relative to its largest
element. Single elements may be nothing but rounding.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.core import sharding
from megatron.core.sharding import Box

TOLERANCE = 1e-10
"""Relative difference up to which an outcome counts as equal in float64."""
NEGLIGIBLE = 1e-6
"""Share of the largest element of all tensors below which a tensor is compared on that scale."""

Array = npt.NDArray[Any]
Traffic = dict[tuple[str, str], tuple[int, int]]
"""(axis, collective) -> (calls, bytes) of one rank in one iteration."""


class Piece(NamedTuple):
    """A box of a logical tensor that some rank holds."""

    name: str
    box: Box
    values: Array


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one rank has when its iterations are done."""

    losses: list[float]
    """Of each iteration the loss, and then its auxiliary ones."""
    norms: list[float]
    shapes: dict[str, tuple[int, ...]]
    """Of the logical tensors that this rank holds boxes of."""
    gradients: list[Piece]
    """Of the first iteration, summed, before they are scaled."""
    weights: list[Piece]
    """After the last iteration."""
    traffic: Traffic
    """Of the last iteration."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What all ranks have, put together."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Array]
    weights: dict[str, Array]
    disagreement: float
    """Largest relative difference between ranks in what they should hold alike."""
    traffic: list[Traffic]
    """By rank."""


def join(shares: Sequence[Share]) -> Outcome:
    """Return the outcome of a layout from the shares of its ranks, in rank order.

    Raises:
        AssertionError: ranks do not agree on a tensor's shape, or none holds some element.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for share in shares:
        for name, shape in share.shapes.items():
            assert shapes.setdefault(name, shape) == shape, f"{name}: {shape}"
    gradients, first = _joined([share.gradients for share in shares], shapes)
    weights, second = _joined([share.weights for share in shares], shapes)
    numbers = [[*share.losses, *share.norms] for share in shares]
    third = max(_apart(one, numbers[0]) for one in numbers)
    return Outcome(
        losses=shares[0].losses,
        norms=shares[0].norms,
        gradients=gradients,
        weights=weights,
        disagreement=max(first, second, third),
        traffic=[share.traffic for share in shares],
    )


@dataclass(frozen=True, kw_only=True)
class Differences:
    """The largest relative differences between an outcome and the one it is compared with."""

    loss: float
    norm: float
    gradients: float
    weights: float
    ranks: float
    """Between ranks that should hold the same."""
    worst: str
    """The tensor whose gradient or weight differs most."""

    @property
    def largest(self) -> float:
        """Return the largest of all; infinite if any is not a number."""
        values = (self.loss, self.norm, self.gradients, self.weights, self.ranks)
        return max(value if math.isfinite(value) else math.inf for value in values)

    @property
    def are_equal(self) -> bool:
        """Return whether the layout counts as equal."""
        return self.largest <= TOLERANCE


def compare(outcome: Outcome, reference: Outcome) -> Differences:
    """Return how far an outcome is from the reference."""
    gradients = _tensor_differences(outcome.gradients, reference.gradients)
    weights = _tensor_differences(outcome.weights, reference.weights)
    named = [(size, f"gradient of {name}") for name, size in gradients.items()]
    named += [(size, f"weight {name}") for name, size in weights.items()]
    return Differences(
        loss=_apart(outcome.losses, reference.losses),
        norm=_apart(outcome.norms, reference.norms),
        gradients=max(gradients.values()),
        weights=max(weights.values()),
        ranks=outcome.disagreement,
        worst=max(named)[1],
    )


def _joined(
    by_rank: Sequence[Sequence[Piece]], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Array], float]:
    """Return the logical tensors, and how far ranks that hold the same elements are apart."""
    tensors = {name: np.zeros(shape) for name, shape in shapes.items()}
    known = {name: np.zeros(shape, dtype=bool) for name, shape in shapes.items()}
    again: list[Piece] = []
    for piece in (piece for pieces in by_rank for piece in pieces):
        place = sharding.box_slices(piece.box)
        if known[piece.name][place].any():
            again.append(piece)
        fresh = ~known[piece.name][place]
        tensors[piece.name][place][fresh] = piece.values[fresh]
        known[piece.name][place] = True
    for name, held in known.items():
        assert held.all(), f"{name}: no rank holds {held.size - held.sum()} of {held.size} elements"
    scales = _scales(tensors)
    apart = 0.0
    for piece in again:
        difference = np.abs(tensors[piece.name][sharding.box_slices(piece.box)] - piece.values)
        apart = max(apart, _ratio(difference.max(initial=0.0), scales[piece.name]))
    return tensors, apart


def _tensor_differences(
    tensors: Mapping[str, Array], reference: Mapping[str, Array]
) -> dict[str, float]:
    """Return the largest difference in each tensor, relative to its largest element."""
    assert tensors.keys() == reference.keys(), sorted(tensors.keys() ^ reference.keys())
    scales = _scales(reference)
    return {
        name: _ratio(np.abs(tensors[name] - value).max(initial=0.0), scales[name])
        for name, value in reference.items()
    }


def _scales(tensors: Mapping[str, Array]) -> dict[str, float]:
    """Return what differences in each tensor are relative to."""
    largest = {name: float(np.abs(value).max(initial=0.0)) for name, value in tensors.items()}
    # A tensor that is next to nothing beside all others may be nothing but their rounding.
    least = NEGLIGIBLE * max(largest.values())
    return {name: max(size, least) for name, size in largest.items()}


def _apart(values: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest relative difference of two lists of numbers."""
    return max(_ratio(abs(a - b), abs(b)) for a, b in zip(values, reference, strict=True))


def _ratio(difference: float, scale: float) -> float:
    if not math.isfinite(difference):
        return math.inf
    return float(difference / scale) if difference else 0.0
