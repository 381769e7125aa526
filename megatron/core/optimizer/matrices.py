"""Whole matrices out of their parts: what of a matrix a rank holds, and what it is made of.

A matrix may be several in one (`Sharding.fused`), whose rows take turns, and it may be cut over
tensor-parallel ranks (of experts those along ``etp``), by rows or by columns. Rows of keys and
values may be held by several ranks; one of them answers for them in sums.

Shapes: M rows and N columns of a whole matrix; m, n of this rank's part.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.core import comm, sharding
from megatron.core.mesh import Axis, Mesh
from megatron.core.sharding import Region, Sharding


@dataclass(frozen=True)
class Block:
    """One of the matrices that a matrix is made of."""

    shape: tuple[int, int]
    """Of all of it."""
    rows: Tensor | None
    """Its rows in the whole matrix; None for all of them."""
    local_rows: Tensor | None
    """Its rows in this rank's part; None for all of them."""
    is_owner: bool
    """This rank answers for its rows; else it holds a copy of another rank's."""


class Matrix:
    """One matrix as this rank sees it.

    Args:
        record: of the parameter; its regions cover it.
        shape: of this rank's part.
        fused: what to take apart: (name, rows) of each matrix in it; empty for none.
        mesh: axes and device.
        axis: ranks it is cut over.
    """

    def __init__(
        self,
        record: Sharding,
        shape: tuple[int, ...],
        fused: Sequence[tuple[str, int]],
        mesh: Mesh,
        axis: Axis,
    ) -> None:
        self.record, self.shape, self.mesh, self.axis = record, shape, mesh, axis
        self.is_cut = shape != record.shape
        self.cut_rows = shape[0] != record.shape[0]
        self.peers: Sequence[tuple[Region, ...]] = ()
        """Regions of each rank along the axis; needed to gather."""
        self.blocks = self._blocks(fused)

    def _blocks(self, fused: Sequence[tuple[str, int]]) -> list[Block]:
        rows, columns = self.record.shape
        here = self._rows()
        if not fused:
            return [Block((rows, columns), None, None, all(owned for _, owned in here))]
        period = sum(size for _, size in fused)
        assert rows % period == 0, f"{self.record.name}: {rows} rows, {fused}"
        blocks, stop = [], 0
        for name, size in fused:
            start, stop = stop, stop + size
            mine = [row for row in range(rows) if start <= row % period < stop]
            local = [i for i, (row, _) in enumerate(here) if start <= row % period < stop]
            held = {here[i][1] for i in local}
            assert len(held) == 1, f"{self.record.name}: {name} is a copy in part"
            shape = (len(mine), columns)
            blocks.append(Block(shape, self._index(mine), self._index(local), held.pop()))
        return blocks

    def _rows(self) -> list[tuple[int, bool]]:
        """Return the whole matrix's row that each local one is (a part of), and if it is owned."""
        found: list[tuple[int, bool]] = [(-1, False)] * self.shape[0]
        for region in self.record.regions:
            (start, stop), (first, last) = region.local[0], region.logical[0]
            owned = all(self.mesh[axis].coordinate == 0 for axis in region.replicated)
            found[start:stop] = [(row, owned) for row in range(first, last)]
        assert all(row >= 0 for row, _ in found), f"{self.record.name} has rows in no region"
        return found

    def _index(self, rows: list[int]) -> Tensor:
        return torch.tensor(rows, device=self.mesh.device)

    def gather(self, x_mn: Tensor) -> Tensor:
        """Return the whole matrix of every rank's part."""
        parts = comm.all_gather(x_mn, self.axis).view(-1, *self.shape)
        whole_MN = x_mn.new_empty(self.record.shape)
        for part_mn, regions in zip(parts, self.peers, strict=True):
            for region in regions:
                box = part_mn[sharding.box_slices(region.local)]
                whole_MN[sharding.box_slices(region.logical)] = box
        return whole_MN

    def part_of(self, whole_MN: Tensor) -> Tensor:
        """Return this rank's part of a whole matrix."""
        part_mn = whole_MN.new_empty(self.shape)
        for region in self.record.regions:
            box = whole_MN[sharding.box_slices(region.logical)]
            part_mn[sharding.box_slices(region.local)] = box
        return part_mn

    def sum_parts(self, partial: Tensor, block: Block) -> None:
        """Complete a sum over the rows or columns of a block, in place."""
        if not block.is_owner:
            partial.zero_()
        comm.all_reduce(partial, self.axis)


def one_of_experts(record: Sharding) -> Sharding:
    """Return the record of each of the matrices of experts that a parameter holds."""
    regions = tuple(
        replace(region, local=region.local[1:], logical=region.logical[1:])
        for region in record.regions
    )
    return replace(record, shape=record.shape[1:], regions=regions)


def learn_peers(matrices: Sequence[Matrix], axis: Axis) -> None:
    """Tell each matrix that is cut over an axis what its peers hold; a collective of it.

    Ranks along the axis hold parts of the same matrices, in one order.
    """
    cut = [matrix for matrix in matrices if matrix.is_cut and matrix.axis is axis]
    mine = [(matrix.record.name, matrix.record.regions) for matrix in cut]
    for matrix, held in zip(cut, zip(*comm.gather_objects(mine, axis), strict=True), strict=True):
        assert {name for name, _ in held} == {matrix.record.name}, held
        matrix.peers = [regions for _, regions in held]
