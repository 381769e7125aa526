"""The objective: a sum over the global batch, divided once.

    per token (default)             sum of token losses / number of valid tokens
    --no-calculate-per-token-loss   mean over microbatches of each microbatch's mean

Both are (sum of numerators) / (sum of denominators) over all microbatches of all ranks, so one
reducer serves training, evaluation and every layout. The denominator is known only when the last
microbatch is done; backward sees numerators divided by a constant, a replica's part of the
*nominal* denominator (every token valid) over the loss scale, and what is left, the constant over
the true denominator, is folded into the optimizer's scale. All sums over ranks travel in one fp64
vector, `Totals`, together with what ranks must agree on at the end of an iteration.

Auxiliary losses, such as those of multi-token prediction, are added with their weights:

    minimised = loss + sum of weight * auxiliary loss

Each has a mask of its own, and its mean over a microbatch counts as much as the microbatch's main
loss does: over one denominator, then. (Per token, a plain sum would count less, since tokens
further ahead are fewer. Megatron-LM does the same.) So what they add depends on which samples
share a microbatch, but on no layout.

Losses of routers of experts are functions of one microbatch, made on whatever stage has the layer
(`core.transformer.moe.balance`): of each the mean over the layers counts as the mean of a
microbatch's main loss does, and so over the same denominator. The layers are those that have the
loss, which of balance are those that choose by score. Weights are of each layer.

Shapes: B samples of a microbatch, S positions of this rank.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core import comm
from megatron.core.mesh import Mesh
from megatron.core.transformer.moe.balance import Balance
from megatron.training.batches import Batch
from megatron.training.expert_loads import Counted, Loads, LoadSums

Masked = tuple[Tensor, Tensor]
"""A loss per token, and its mask."""
NOTHING: Mapping[str, float] = MappingProxyType({})
NO_EXPERTS = Counted()


class TokenLosses(NamedTuple):
    """What a forward step returns: a loss per token, and which of them count."""

    losses_BS: Tensor
    mask_BS: Tensor
    """1 for a valid token, 0 for one that does not count; of any dtype."""
    auxiliary: Mapping[str, Masked] = MappingProxyType({})
    """Auxiliary losses by name, those of the objective."""


class Terms(NamedTuple):
    """What one microbatch adds to the sums of a rank."""

    numerator: Tensor
    denominator: Tensor
    tokens: Tensor
    """Valid ones."""
    auxiliary: tuple[Tensor, ...] = ()
    """Numerators of the auxiliary losses."""


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
    auxiliary: Mapping[str, float] = NOTHING
    """Numerators of the auxiliary losses, by name."""
    loads: Loads | None = None
    """How tokens fell on experts, where the model has some and trains; on the device."""

    @property
    def loss(self) -> float:
        """Return the loss of the global batch; NaN without a valid token."""
        return self.numerator / self.denominator if self.denominator else float("nan")

    @property
    def auxiliary_losses(self) -> dict[str, float]:
        """Return the auxiliary losses of the global batch, without their weights."""
        counted = self.denominator or float("nan")
        return {name: numerator / counted for name, numerator in self.auxiliary.items()}

    @property
    def is_finite(self) -> bool:
        """Return whether every loss is finite."""
        return all(map(math.isfinite, (self.numerator, *self.auxiliary.values())))

    @property
    def stop(self) -> tuple[bool, bool, bool]:
        """Return whether any rank saw the signal, the end of its time, the stop file."""
        return self.signal > 0, self.duration > 0, self.stop_file > 0


@dataclass(frozen=True)
class Objective:
    """How token losses become the one number that is minimised."""

    per_token: bool
    mesh: Mesh
    auxiliary: Mapping[str, float] = field(default_factory=dict)
    """Weights of the auxiliary losses, by name."""
    prepare: Callable[[Batch], Batch] = dict
    """Adds to a microbatch, before its samples are cut over ranks, what auxiliary losses need."""
    balanced: Mapping[str, float] = field(default_factory=dict)
    """Weights of the losses of routers, by name."""
    routers: tuple[int, ...] = ()
    """Numbers of the layers with routers in the whole model."""
    num_experts: int = 0
    """Of each of those."""
    expert_ranks: int = 0
    """That experts are spread over, where it is to be told how uneven their loads are."""
    judged_routers: tuple[int, ...] | None = None
    """Those of the layers whose routers choose by score, and have losses of balance; None for all.
    """

    def nominal(self, samples: int, micro_batch_size: int, seq_length: int) -> float:
        """Return the denominator of a global batch in which every token is valid."""
        return float(samples * seq_length if self.per_token else samples // micro_batch_size)

    def terms(self, tokens: TokenLosses, *, empty_counts: bool = True) -> Terms:
        """Return what one microbatch adds on this rank.

        Args:
            tokens: what the forward step returned: losses and masks ``[B, S]``, of the positions
                that this context-parallel rank holds. A mask may have any dtype, and is cast to
                that of its losses; the terms are scalars of that dtype.
            empty_counts: a mean over microbatches counts one without a valid token as a loss of 0,
                as Megatron-LM does in training, where every layout has the same microbatches. An
                evaluation leaves it out: how many only pad a set depends on the replicas.
        """
        assert tokens.auxiliary.keys() == self.auxiliary.keys(), list(tokens.auxiliary)
        further = [tokens.auxiliary[name] for name in self.auxiliary]
        summed = [_masked_sum(*one) for one in (tokens[:2], *further)]
        total, count = summed[0]
        if self.per_token and not further:
            return Terms(total, count, count)
        # The microbatch's tokens are spread over the context-parallel ranks.
        counts = torch.stack([one for _, one in summed])
        comm.all_reduce(counts, self.mesh.cp)
        whole, *others = counts
        means = [sum_ / n.clamp(min=1.0) for (sum_, _), n in zip(summed[1:], others, strict=True)]
        if self.per_token:
            return Terms(total, count, count, tuple(mean * whole for mean in means))
        share = torch.full_like(count, 1.0 / self.mesh.cp.size)
        if not empty_counts:
            share = share * (whole > 0)
        return Terms(total / whole.clamp(min=1.0), share, count, tuple(means))

    def share_of(self, valid: Tensor) -> Tensor:
        """Return the denominator of a whole microbatch, fp64, from its number of valid tokens."""
        return valid.double() if self.per_token else torch.ones_like(valid, dtype=torch.float64)

    def minimised(self, terms: Terms) -> Tensor:
        """Return the numerator of what backward starts from."""
        weights = self.auxiliary.values()
        weighted = [w * x for w, x in zip(weights, terms.auxiliary, strict=True)]
        return sum(weighted, start=terms.numerator)


def _masked_sum(losses_BS: Tensor, mask_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses that count, and how many do."""
    mask_BS = mask_BS.to(losses_BS.dtype)
    return (losses_BS * mask_BS).sum(), mask_BS.sum()


class Accumulator:
    """Sums the terms of this rank's microbatches, on the device, in fp64.

    ``auxiliary`` names the auxiliary losses, and ``balanced`` those of routers, alike on all ranks.
    ``counts`` is false where another rank adds the same terms; ``counted`` says what is counted of
    experts.
    """

    def __init__(
        self,
        mesh: Mesh,
        auxiliary: Sequence[str] = (),
        balanced: Sequence[str] = (),
        *,
        counts: bool = True,
        counted: Counted = NO_EXPERTS,
    ) -> None:
        self._mesh, self._names, self._counts = mesh, (*auxiliary, *balanced), counts
        self._first = 3 + len(auxiliary)
        self._loads = LoadSums(counted, mesh.device)
        self._sums = torch.zeros(3 + len(self._names), dtype=torch.float64, device=mesh.device)

    def add(
        self,
        numerator: Tensor,
        denominator: Tensor,
        tokens: Tensor,
        auxiliary: Sequence[Tensor] = (),
    ) -> None:
        """Add one microbatch."""
        if self._counts:
            numbers = torch.stack([numerator, denominator, tokens, *auxiliary])
            self._sums[: self._first] += numbers.detach().double()

    def add_balanced(
        self, balance: Balance, numbers: Mapping[int, int], share: Tensor | None
    ) -> None:
        """Add what the routers of a chunk noted on one microbatch.

        Args:
            balance: of the microbatch; its losses are equal on all ranks that share it.
            numbers: of the layers in the whole model.
            share: the denominator of the microbatch, where routers have losses.
        """
        if self._mesh.tp.coordinate or self._mesh.cp.coordinate:
            share = None
        for layer, noted in balance.noted.items():
            self._loads.add(numbers[layer], noted, share)
        if share is not None:
            counted, sums = self._loads.counted, balance.sums()
            for number, name in enumerate(self._names[self._first - 3 :], self._first):
                if name in sums:
                    layers = max(1, len(counted.layers_with(name)))
                    self._sums[number] += sums[name].double() / layers * share

    def reduce(self, seen: tuple[bool, bool, bool] = (False, False, False)) -> Totals:
        """Return the sums over the world; a collective, and the one wait for the device.

        Args:
            seen: this rank's reasons to stop.
        """
        bad = (~torch.isfinite(self._sums).all()).double().reshape(1)
        mine = torch.tensor(seen, dtype=torch.float64, device=self._sums.device)
        loads_LX = self._loads.sums_LX
        vector = torch.cat([self._sums, bad, bad * self._mesh.rank, mine, loads_LX.flatten()])
        with comm.waiting("the sums over the world"):
            comm.all_reduce(vector, self._mesh.world)
            numbers, further = vector[: len(vector) - loads_LX.numel()].tolist(), len(self._names)
        auxiliary = dict(zip(self._names, numbers[3 : 3 + further], strict=True))
        totals = Totals(*numbers[:3], *numbers[3 + further :])._replace(auxiliary=auxiliary)
        if not loads_LX.numel():
            return totals
        summed_LX = vector[len(vector) - loads_LX.numel() :].view_as(loads_LX)
        loads = Loads(self._loads.counted, summed_LX, totals.denominator)
        return totals._replace(loads=loads)
