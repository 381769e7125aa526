"""Norms and zeros of the whole model, from the parts that each rank answers for.

Each logical element counts once: padding, what another rank owns and what another replica has alike
are left out (`owned_ranges` of a buffer). One sum over the world adds up what ranks have, so that
all of them get the same numbers.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from megatron.core import comm
from megatron.core.distributed import layout
from megatron.core.distributed.ranges import Part, intersect
from megatron.core.mesh import Mesh
from megatron.core.optimizer import clip
from megatron.core.optimizer.mixed_precision import Shard


class Norms:
    """Sums over what this rank owns of its shards, and over the world.

    Args:
        shards: of this rank.
        groups: names of the optimizer groups in them.
        mesh: axes and device.
    """

    def __init__(self, shards: Sequence[Shard], groups: Sequence[str], mesh: Mesh) -> None:
        self._shards, self._groups, self._mesh = shards, groups, mesh
        self._owned: list[list[Part]] = []
        self._numel = 0
        for shard in shards:
            ranges = shard.buffer.owned_ranges(mesh)
            self._numel += sum(part.stop - part.start for _, part in shard.cut(ranges))
            self._owned.append(shard.cut(layout.bridge_gaps(ranges, shard.buffer.plan)))

    @torch.no_grad()
    def gradient(self, scale: float | Tensor, count_zeros: bool) -> tuple[Tensor, Tensor | None]:
        """Return the norm of the scaled gradient, and the count of its zeros if it is asked for."""
        device = self._mesh.device
        totals = torch.zeros(2, dtype=torch.float64, device=device)
        totals[0] = clip.sum_of_squares(self._pieces("grads"), device)
        if count_zeros:
            totals[1] = clip.count_zeros(self._pieces("grads"), self._numel, device)
        comm.all_reduce(totals, self._mesh.world)
        return totals[0].sqrt() * scale, totals[1] if count_zeros else None

    @torch.no_grad()
    def by_group(self, scale: float | Tensor) -> dict[str, Tensor]:
        """Return the norm of the scaled gradient of each optimizer group.

        A collective of the world, and the first time of the pipeline too.
        """
        device, names = self._mesh.device, self._all_groups
        totals = torch.zeros(len(names), dtype=torch.float64, device=device)
        for shard, parts in zip(self._shards, self._owned_by_group, strict=True):
            for group, mine in parts:
                found = (shard.grads[number][part] for number, part in mine)
                totals[names.index(group)] += clip.sum_of_squares(found, device)
        comm.all_reduce(totals, self._mesh.world)
        return dict(zip(names, (totals.sqrt() * scale).unbind(), strict=True))

    @torch.no_grad()
    def weights(self) -> Tensor:
        """Return the norm of the weights (of the masters, where there are)."""
        total = clip.sum_of_squares(self._pieces("mains"), self._mesh.device)
        comm.all_reduce(total, self._mesh.world)
        return total.sqrt()

    def _pieces(self, what: Literal["grads", "mains"]) -> Iterator[Tensor]:
        for shard, parts in zip(self._shards, self._owned, strict=True):
            pieces: list[Tensor] = getattr(shard, what)
            for number, part in parts:
                yield pieces[number][part]

    @functools.cached_property
    def _all_groups(self) -> list[str]:
        """The names of the whole model's groups."""
        everyone = comm.gather_objects(list(self._groups), self._mesh.pp)
        return sorted({name for held in everyone for name in held})

    @functools.cached_property
    def _owned_by_group(self) -> list[list[tuple[str, list[Part]]]]:
        """Of each shard, the parts of each group that this rank counts."""
        found = []
        for shard in self._shards:
            buffer = shard.buffer
            ranges = layout.bridge_gaps(buffer.owned_ranges(self._mesh), buffer.plan)
            parts = []
            for group, segment in buffer.plan.segments:
                inside = [intersect(segment, each) for each in ranges]
                parts.append((group, shard.cut(filter(None, inside))))
            found.append(parts)
        return found
