"""The two ends of a tensor-parallel region, as conjugate collectives.

A column-parallel layer needs its whole input; a row-parallel layer makes partial sums. With
sequence parallelism the activations between regions are sharded along the sequence (dim 0), and
each collective becomes half of an all-reduce:

                      forward                backward
    enter, plain      nothing                all-reduce
    leave, plain      all-reduce             nothing
    enter, sequence   all-gather             reduce-scatter
    leave, sequence   reduce-scatter         all-gather

(Shoeybi et al., 2019; Korthikanti et al., 2022.) The entry of a matrix product is part of
`layers.linear`, whose weight gradient is computed while the collective of the input gradient runs;
the entry of anything else, and the exit, are here. `cut` and `join` enclose work that ranks do
for a share of the tokens each, where all of them hold all tokens around it.

Shapes: S positions, this rank's share of them under sequence parallelism outside a region; B batch,
H hidden size. A tensor without a suffix may have any shape.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.core import comm
from megatron.core.mesh import Axis

Collective = Callable[[Tensor, Axis], Tensor]


def all_reduced(x: Tensor, axis: Axis) -> Tensor:
    """Return the sum of ``x`` over ``axis``, leaving ``x`` as it is."""
    if axis.size == 1:
        return x
    total = x.contiguous().clone()
    comm.all_reduce(total, axis)
    return total


def unchanged(x: Tensor, axis: Axis) -> Tensor:
    """Return ``x``: the side of a conjugate pair that needs no communication."""
    return x


def own_slice(x: Tensor, axis: Axis) -> Tensor:
    """Return this rank's share of ``x`` along dim 0."""
    share = x.shape[0] // axis.size
    return x[axis.coordinate * share : (axis.coordinate + 1) * share]


class _Conjugate(torch.autograd.Function):
    """Apply one collective on the way in and its conjugate to the gradient on the way out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, forward: Collective, back: Collective) -> Tensor:
        ctx.axis, ctx.back = axis, back
        out = forward(x.contiguous(), axis)
        # Autograd wants a new tensor; a view is one.
        return out.view_as(out) if out is x else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grads[0].contiguous(), ctx.axis), None, None, None


def _apply(x: Tensor, axis: Axis, forward: Collective, back: Collective) -> Tensor:
    if axis.size == 1:
        return x
    return _Conjugate.apply(x, axis, forward, back)  # type: ignore[no-any-return]


def enter(x_SBH: Tensor, axis: Axis, sequence_parallel: bool) -> Tensor:
    """Bring what every rank holds, or its share of the sequence, into a tensor-parallel region."""
    if sequence_parallel:
        return _apply(x_SBH, axis, comm.all_gather, comm.reduce_scatter)
    return _apply(x_SBH, axis, unchanged, all_reduced)


def cut(x: Tensor, axis: Axis) -> Tensor:
    """Return this rank's share along dim 0 of what every rank holds alike."""
    return _apply(x, axis, own_slice, comm.all_gather)


def join(x: Tensor, axis: Axis) -> Tensor:
    """Return all ranks' shares along dim 0, of which every rank goes on alike."""
    return _apply(x, axis, comm.all_gather, own_slice)


def leave(x_SBH: Tensor, axis: Axis, sequence_parallel: bool) -> Tensor:
    """Sum the partial results of a tensor-parallel region."""
    if sequence_parallel:
        return _apply(x_SBH, axis, comm.reduce_scatter, comm.all_gather)
    return _apply(x_SBH, axis, all_reduced, unchanged)
