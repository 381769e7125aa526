"""The objective: a sum over the global batch, divided once.

    per token (default)             sum of token losses / number of valid tokens
    --no-calculate-per-token-loss   mean over microbatches of each microbatch's mean

Both are (sum of numerators) / (sum of denominators) over all microbatches of all ranks, so one
reducer serves training, evaluation and every layout. The denominator is known only when the last
microbatch is done; backward sees numerators divided by a constant, the *nominal* denominator (every
token valid), and what is left, nominal / true, is folded into the optimizer's scale. All sums over
ranks travel in one fp64 vector, `Totals`, together with what ranks must agree on at the end of an
iteration.

Shapes: B samples of a microbatch, S positions of this rank.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core import comm
from megatron.core.mesh import Mesh


class TokenLosses(NamedTuple):
    """What a forward step returns: a loss per token, and which of them count."""

    losses_BS: Tensor
    mask_BS: Tensor
    """1 for a valid token, 0 for one that does not count."""


class Totals(NamedTuple):
    """Sums over the world of one iteration."""

    numerator: float
    denominator: float
    tokens: float
    """Valid tokens."""
    bad_ranks: float
    """Ranks whose own loss was not finite."""
    bad_rank: float
    """Sum of their numbers."""
    signal: float
    duration: float
    stop_file: float

    @property
    def loss(self) -> float:
        """Return the loss of the global batch; NaN without a valid token."""
        return self.numerator / self.denominator if self.denominator else float("nan")

    @property
    def stop(self) -> tuple[bool, bool, bool]:
        """Return whether any rank saw the signal, the end of its time, the stop file."""
        return self.signal > 0, self.duration > 0, self.stop_file > 0


@dataclass(frozen=True)
class Objective:
    """How token losses become the one number that is minimised."""

    per_token: bool
    mesh: Mesh

    def nominal(self, samples: int, micro_batch_size: int, seq_length: int) -> float:
        """Return the denominator of a global batch in which every token is valid."""
        return float(samples * seq_length if self.per_token else samples // micro_batch_size)

    def terms(
        self, tokens: TokenLosses, *, empty_counts: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (numerator, denominator, valid tokens) of one microbatch on this rank.

        Args:
            tokens: what the forward step returned.
            empty_counts: a mean over microbatches counts one without a valid token as a loss of 0,
                as Megatron-LM does in training, where every layout has the same microbatches. An
                evaluation leaves it out: how many only pad a set depends on the replicas.
        """
        losses_BS, mask_BS = tokens
        mask_BS = mask_BS.to(losses_BS.dtype)
        total, count = (losses_BS * mask_BS).sum(), mask_BS.sum()
        if self.per_token:
            return total, count, count
        # The microbatch's tokens are spread over the context-parallel ranks.
        whole = count.clone()
        comm.all_reduce(whole, self.mesh.cp)
        share = torch.full_like(count, 1.0 / self.mesh.cp.size)
        if not empty_counts:
            share = share * (whole > 0)
        return total / whole.clamp(min=1.0), share, count


class Accumulator:
    """Sums the terms of this rank's microbatches, on the device, in fp64.

    ``counts`` is false where another rank adds the same terms.
    """

    def __init__(self, mesh: Mesh, *, counts: bool = True) -> None:
        self._mesh, self._counts = mesh, counts
        self._sums = torch.zeros(3, dtype=torch.float64, device=mesh.device)

    def add(self, numerator: Tensor, denominator: Tensor, tokens: Tensor) -> None:
        """Add one microbatch."""
        if self._counts:
            self._sums += torch.stack([numerator.detach(), denominator, tokens]).double()

    def reduce(self, seen: tuple[bool, bool, bool] = (False, False, False)) -> Totals:
        """Return the sums over the world; a collective, and the one wait for the device.

        Args:
            seen: this rank's reasons to stop.
        """
        bad = (~torch.isfinite(self._sums[0])).double().reshape(1)
        mine = torch.tensor(seen, dtype=torch.float64, device=self._sums.device)
        vector = torch.cat([self._sums, bad, bad * self._mesh.rank, mine])
        comm.all_reduce(vector, self._mesh.world)
        return Totals(*vector.tolist())
