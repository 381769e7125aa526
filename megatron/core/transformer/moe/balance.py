"""One microbatch as its routers see it: which tokens count, and what becomes of their losses.

A layer's auxiliary losses are functions of its router alone, whatever stage it is on. They join the
backward at the layer's output, by an identity:

    forward     y                        losses are noted, to be logged
    backward    dy                       and ``start`` times the weighted losses' gradients

so that nothing else knows of them: stages, recomputation and split backwards do as they always do.
``start`` is what the backward of a loss of weight 1 begins with, which the objective says.
(Megatron-LM scales them in the same place.)
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.transformer.moe.routing import Routing


class Noted(NamedTuple):
    """What a layer's router counted on this rank, and lost; see `Routing`."""

    counts_E: Tensor
    kept_counts_E: Tensor
    losses: Mapping[str, Tensor]
    """Without gradients; empty without a backward."""


class Balance:
    """What the routers of one forward are told, and what they tell.

    Args:
        valid_BS: tokens that count, of any dtype, of the positions that this context-parallel rank
            holds; None for all.
        weights: of the auxiliary losses, by name.
        start: what backward begins with for a loss of weight 1, a scalar; None without a backward.
    """

    def __init__(
        self,
        valid_BS: Tensor | None,
        weights: Mapping[str, float],
        start: Tensor | None = None,
    ) -> None:
        self.valid_BS, self._weights, self._start = valid_BS, weights, start
        self.noted: dict[int, Noted] = {}
        """By layer."""

    def attach(self, y: Tensor, routing: Routing, layer: int) -> Tensor:
        """Return ``y``, whose backward is that of the weighted losses too; and note the routing.

        A forward that is made again notes the same once more.

        Args:
            y: what the layer gives.
            routing: what the layer's router decided.
            layer: a number of the layer's own.
        """
        losses = {} if self._start is None else routing.losses
        detached = {name: loss.detach() for name, loss in losses.items()}
        self.noted[layer] = Noted(routing.counts_E, routing.kept_counts_E, detached)
        if not losses:
            return y
        weighted = [self._weights[name] * loss for name, loss in losses.items()]
        total = torch.stack(weighted).sum()
        return _Attach.apply(y, total, self._start)  # type: ignore[no-any-return]

    def sums(self) -> dict[str, Tensor]:
        """Return the sum of each loss over the layers that noted it."""
        found: dict[str, Tensor] = {}
        for noted in self.noted.values():
            for name, loss in noted.losses.items():
                found[name] = found[name] + loss if name in found else loss
        return found


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, total: Tensor, start: Tensor) -> Tensor:
        ctx.start = start.to(total.dtype)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return grads[0], ctx.start, None
