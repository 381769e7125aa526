"""Sum gradients over model-parallel axes, where ranks hold parts of one gradient.

Each region of a parameter says over which axes (`sharding.Region.summed`): norm weights and biases
under sequence parallelism, for one, see a part of the sequence on every rank. A buffer holds
parameters with equal sets of such axes, so where all regions agree one collective per axis sums the
whole buffer; otherwise the regions are packed, summed and unpacked. Over axes of size 1 nothing is
moved. A tied embedding has a copy on the first and one on the last stage, whose gradients are
summed over these two.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from megatron.core import comm, sharding
from megatron.core.distributed.buffers import FlatBuffer
from megatron.core.mesh import Mesh


def sum_regions(buffers: Iterable[FlatBuffer], mesh: Mesh) -> None:
    """Complete the gradients of regions that several ranks hold parts of, in place."""
    for buffer in buffers:
        if buffer.is_tied:
            comm.all_reduce(buffer.grad, mesh.ends)
        for name in buffer.summed:
            axis = mesh[name]
            if axis.size == 1:
                continue
            views = _regions(buffer, name)
            if views is None:
                comm.all_reduce(buffer.grad, axis)
                continue
            packed = torch.cat([view.reshape(-1) for view in views])
            comm.all_reduce(packed, axis)
            parts = packed.split([view.numel() for view in views])
            for view, part in zip(views, parts, strict=True):
                view.copy_(part.view_as(view))


def _regions(buffer: FlatBuffer, axis: str) -> list[Tensor] | None:
    """Return the gradients of the regions summed over ``axis``, or None when that is all of them.

    Padding lies in no region, but its gradient is zero on every rank: summing it is harmless.
    """
    views: list[Tensor] = []
    everything = True
    for parameter in buffer.parameters:
        assert parameter.grad is not None
        for region in sharding.of(parameter).regions:
            if axis in region.summed:
                views.append(parameter.grad[sharding.box_slices(region.local)])
            else:
                everything = False
    return None if everything else views
