"""Sum gradients over model-parallel axes, where ranks hold parts of one gradient.

Each region of a parameter says over which axes (`sharding.Region.summed`): norm weights and biases
under sequence parallelism, for one, see a part of the sequence on every rank. A buffer holds
parameters with equal sets of such axes, so where all regions agree one collective per axis sums the
whole buffer; otherwise the regions are packed, summed and unpacked. Over axes of size 1 nothing is
moved. A tied embedding has a copy on the first and one on the last stage, whose gradients are
summed over these two.

This comes after the sum over replicas, and concerns what this rank updates (`Pieces.spans`):
the ranks along a model-parallel axis have equal shares.
"""

from collections.abc import Iterable

import torch

from megatron.core import comm, held
from megatron.core.distributed.pieces import Pieces
from megatron.core.distributed.ranges import Range
from megatron.core.mesh import Axis, Mesh


def sum_regions(buffers: Iterable[Pieces], mesh: Mesh) -> None:
    """Complete the gradients of regions that several ranks hold parts of, in place."""
    buffers = list(buffers)
    # First, since stages have them in different places, and axes may be one group.
    for buffer in buffers:
        if buffer.is_tied:
            _sum(buffer, [(0, buffer.plan.size)], mesh.ends)
    for buffer in buffers:
        for name in buffer.summed:
            if mesh[name].size > 1:
                _sum(buffer, buffer.summed_ranges(name), mesh[name])


def _sum(buffer: Pieces, ranges: Iterable[Range], axis: Axis) -> None:
    views = [buffer.grad_pieces[number][part] for number, part in buffer.cut(ranges)]
    if axis.size == 1 or not views:
        return
    if len(views) == 1:
        comm.all_reduce(views[0], axis)
        return
    packed = torch.cat(views)
    held.see(packed)
    comm.all_reduce(packed, axis)
    for view, part in zip(views, packed.split([len(view) for view in views]), strict=True):
        view.copy_(part)
