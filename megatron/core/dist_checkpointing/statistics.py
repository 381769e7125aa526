"""What values a stored tensor has, and where two of them differ; a slab at a time.

Everything is computed in fp64, and whole numbers are compared as such.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.boxes import slabs, volume, whole_box
from megatron.core.dist_checkpointing.stream import ReadSlab
from megatron.core.progress import Told, untold
from megatron.core.sharding import Box

AT_ONCE = 4 * 2**20
"""Bytes of fp64 values that are looked at in one go; several copies of them are alive."""


@dataclass
class Statistics:
    """Of the finite values of a tensor, and how many are not finite."""

    count: int = 0
    minimum: float = math.inf
    maximum: float = -math.inf
    total: float = 0.0
    squares: float = 0.0
    zeros: int = 0
    nans: int = 0
    infinities: int = 0

    @property
    def mean(self) -> float:
        """Return the mean; NaN of no values."""
        return self.total / self.finite if self.finite else math.nan

    @property
    def norm(self) -> float:
        """Return the Euclidean norm."""
        return math.sqrt(self.squares)

    @property
    def finite(self) -> int:
        """Return how many values are finite."""
        return self.count - self.nans - self.infinities

    def add(self, values: Tensor) -> None:
        """Take note of more values, of any shape and dtype."""
        flat = values.reshape(-1).double()
        nans, infinities = int(flat.isnan().sum()), int(flat.isinf().sum())
        self.count += flat.numel()
        self.nans += nans
        self.infinities += infinities
        if nans or infinities:
            flat = flat[flat.isfinite()]
        if flat.numel():
            low, high = flat.aminmax()
            self.minimum = min(self.minimum, float(low))
            self.maximum = max(self.maximum, float(high))
            self.total += float(flat.sum())
            self.squares += float(flat.square().sum())
            self.zeros += int((flat == 0).sum())

    def to_json(self) -> dict[str, Any]:
        """Return the figures by name; a minimum or mean of no values is None."""
        some = self.finite > 0
        return {
            "elements": self.count,
            "min": self.minimum if some else None,
            "max": self.maximum if some else None,
            "mean": self.mean if some else None,
            "norm": self.norm,
            "zeros": self.zeros,
            "nan": self.nans,
            "inf": self.infinities,
        }


def statistics(key: str, shape: tuple[int, ...], read: ReadSlab, told: Told = untold) -> Statistics:
    """Return what values a tensor has."""
    found = Statistics()
    for box in slabs(whole_box(shape), 8, AT_ONCE):
        values = read(key, box)
        found.add(values)
        told(key, values.nbytes)
    return found


@dataclass
class Difference:
    """Where and by how much the values of two tensors of one shape differ."""

    elements: int = 0
    different: int = 0
    max_absolute: float = 0.0
    max_relative: float = 0.0
    first: tuple[int, ...] | None = None
    """Index of the first one, in row-major order."""
    first_values: tuple[float, float] | None = None

    def add(self, box: Box, left: Tensor, right: Tensor, tolerance: float) -> None:
        """Compare two boxes at the same place.

        Values differ when their distance exceeds the tolerance, both as it is and as a share of
        the larger one. Two NaN are equal, as are two infinities of one sign.
        """
        a, b = left.reshape(-1), right.reshape(-1)
        exact = (a == b) | (a.isnan() & b.isnan())
        self.elements += a.numel()
        if bool(exact.all()):
            return
        distance = (a.double() - b.double()).abs()
        distance[exact] = 0.0
        larger = torch.maximum(a.double().abs(), b.double().abs())
        share = torch.where(exact, 0.0, distance / larger)
        # A NaN or an infinity beside a number differs by any measure.
        distance[distance.isnan()] = math.inf
        share[~share.isfinite()] = math.inf
        far = ~exact if tolerance == 0 else (distance > tolerance) & (share > tolerance)
        self.max_absolute = max(self.max_absolute, float(distance.max()))
        self.max_relative = max(self.max_relative, float(share.max()))
        places = far.nonzero()
        self.different += len(places)
        if self.first is None and len(places):
            at = int(places[0])
            self.first = _index(box, at)
            self.first_values = (float(a[at]), float(b[at]))


def _index(box: Box, at: int) -> tuple[int, ...]:
    """Return the place in the tensor of the element number ``at`` of a box."""
    index = []
    for number, (start, stop) in enumerate(box):
        inner = volume(box[number + 1 :])
        index.append(start + at // inner % (stop - start))
    return tuple(index)


def difference(
    key: str,
    shape: tuple[int, ...],
    left: ReadSlab,
    right: ReadSlab,
    tolerance: float = 0.0,
    told: Told = untold,
) -> Difference:
    """Return where a tensor of one checkpoint differs from that of another, of the same shape."""
    found = Difference()
    for box in slabs(whole_box(shape), 8, AT_ONCE):
        a, b = left(key, box), right(key, box)
        if a.dtype != b.dtype:
            a, b = a.double(), b.double()
        elif a.dtype.is_floating_point and a.itemsize == 1:  # fp8 has no comparison
            a, b = a.float(), b.float()
        found.add(box, a, b, tolerance)
        told(key, a.nbytes + b.nbytes)
    return found
