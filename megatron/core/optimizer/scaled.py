"""Numbers in fp16 with a power of two for each block of 64: 2 + 1/64 bytes a number.

fp16 has 11 bits, three more than bf16, but holds nothing below 6e-8, where squares of gradients
lie. So neighbours share a scale:

    number = half * 2^exponent                      exponent: int8, one for each `BLOCK`

The exponent puts a block's largest number, rounded to 11 bits, into [2^15, 2^16). Smaller ones
have all 11 bits too, down to 2^-30 of the largest. Below that fp16 would drop bits until numbers
neither grow nor decay, so there are none: they become 0, or in states that steps are divided by
2^-30 of the largest (about), since a 0 there would make a step large.

Decoding is exact in fp32, as the scale is a power of two, and what was decoded is encoded into the
same bits: a block's exponent follows from its numbers alone, after they are rounded. So checkpoints
hold fp32 numbers, and a run that goes on from one has the bits it had.

Shapes: B blocks, E numbers in a block.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron.core.optimizer.memory import BLOCK, blocks

DIVISORS = frozenset({"exp_avg_sq"})
"""States that steps are divided by."""

_LEAST = 2.0**-14
"""Smallest half with 11 bits."""
_LIMIT = 65520.0 * 2.0**112
"""From here on fp32 numbers round beyond fp32 at 11 bits; they count as infinite."""
_SMALLEST_EXPONENT = -125
"""With it halves reach down to what fp32 holds, and 2^exponent is a normal fp32 number."""


class Scaled:
    """A flat range of numbers in blocks; the last block may be shorter.

    It is used as a tensor is where numbers are widened: `to`, `copy_`, slices that are views.

    Args:
        halves: [n], fp16.
        exponents: [blocks of n], int8.
        divides: steps are divided by these numbers, which are not negative.
    """

    def __init__(self, halves: Tensor, exponents: Tensor, *, divides: bool) -> None:
        assert exponents.numel() == blocks(halves.numel()), (exponents.shape, halves.shape)
        self.halves, self.exponents, self.divides = halves, exponents, divides

    @classmethod
    def zeros(cls, sizes: Sequence[int], device: torch.device, *, divides: bool) -> list["Scaled"]:
        """Return ranges of zeros, with blocks of their own, in one piece of memory."""
        counts = [blocks(size) for size in sizes]
        halves = torch.zeros(sum(sizes), dtype=torch.float16, device=device)
        exponents = torch.zeros(sum(counts), dtype=torch.int8, device=device)
        pieces = zip(halves.split(list(sizes)), exponents.split(counts), strict=True)
        return [cls(mine, theirs, divides=divides) for mine, theirs in pieces]

    def numel(self) -> int:
        """Return how many numbers there are."""
        return self.halves.numel()

    @property
    def device(self) -> torch.device:
        """Return where they are."""
        return self.halves.device

    @property
    def nbytes(self) -> int:
        """Return the bytes of numbers and scales."""
        total: int = self.halves.nbytes + self.exponents.nbytes
        return total

    def __getitem__(self, part: slice) -> "Scaled":
        """Return a part of the range, as a view; it starts where a block does."""
        start, stop, step = part.indices(self.numel())
        assert start % BLOCK == 0 and step == 1, f"{part} cuts a block of {BLOCK}"
        exponents = self.exponents[start // BLOCK : blocks(stop)]
        return Scaled(self.halves[start:stop], exponents, divides=self.divides)

    def to(self, dtype: torch.dtype) -> Tensor:
        """Return the numbers in fp32, exactly."""
        assert dtype == torch.float32, dtype
        wide = torch.empty_like(self.halves, dtype=torch.float32)
        for wide_BE, halves_BE, exponents_B in self._blocks(wide):
            torch.mul(halves_BE, _power_of_two(exponents_B)[:, None], out=wide_BE)
        return wide

    def copy_(self, values: Tensor) -> "Scaled":
        """Round fp32 ``values`` [n] into the range."""
        assert values.dtype == torch.float32, values.dtype
        for values_BE, halves_BE, exponents_B in self._blocks(values):
            sizes_BE = values_BE.abs()
            sizes_BE.masked_fill_(~(sizes_BE < _LIMIT), 0)  # neither infinities nor NaN
            exponents_B.copy_(_exponent(sizes_BE.amax(1)))
            scaled_BE = values_BE * _power_of_two(-exponents_B)[:, None]
            is_small_BE = scaled_BE.abs() < _LEAST
            if self.divides:
                scaled_BE.masked_fill_(is_small_BE & (values_BE != 0), _LEAST)
            else:
                scaled_BE.masked_fill_(is_small_BE, 0)
            halves_BE.copy_(scaled_BE)
        return self

    def decoded(self, start: int, stop: int) -> Tensor:
        """Return numbers ``start`` to ``stop``, which may cut blocks, in fp32."""
        first = start // BLOCK * BLOCK
        return self[first:stop].to(torch.float32)[start - first :]

    def _blocks(self, wide: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield views of ``wide``, the halves and the exponents: whole blocks, and what is left."""
        whole = self.numel() // BLOCK * BLOCK
        if whole:
            halves_BE, wide_BE = (x[:whole].view(-1, BLOCK) for x in (self.halves, wide))
            yield wide_BE, halves_BE, self.exponents[: whole // BLOCK]
        if whole < self.numel():
            halves_BE, wide_BE = (x[whole:].view(1, -1) for x in (self.halves, wide))
            yield wide_BE, halves_BE, self.exponents[whole // BLOCK :]


def _exponent(largest: Tensor) -> Tensor:
    """Return the exponents of blocks by the sizes of their largest numbers, fp32.

    The bits of an fp32 number are its exponent and 23 bits of fraction: adding half of the last of
    the 10 that a half keeps rounds it, and what carries counts in the exponent.
    """
    biased = (largest.view(torch.int32) + (1 << 12)) >> 23
    return (biased - 127 - 15).clamp_(min=_SMALLEST_EXPONENT)


def _power_of_two(exponents: Tensor) -> Tensor:
    """Return 2^exponent in fp32, by its bits: a library's power need not be exact."""
    return ((exponents.to(torch.int32) + 127) << 23).view(torch.float32)
