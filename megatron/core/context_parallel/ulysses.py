"""Ulysses: trade a part of the sequence with all heads for the whole sequence with a part of them.

    forward     all-to-all of q, k and v together, all-to-all of the output
    backward    the same two, the other way

Between the two any attention works, on whole samples in order. With fewer key heads than ranks each
is sent to all ranks that need it, and its gradients are summed by their repetition's backward.

Inside an outer ring (``a2a+p2p``) the ranks of one all-to-all hold neighbouring chunks, so that
together they hold two runs of positions: what a rank of the outer ring is to hold.

Shapes: s positions of a rank, S = a * s over the a ranks of an all-to-all, B batch, n heads,
g query groups, D head size, E value head size, X channels of several heads.

(Jacobs et al., 2023; the two levels: Fang and Zhao, 2024.)
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron.core import comm
from megatron.core.context_parallel.partition import unzigzag, zigzag
from megatron.core.kernels.attention import NONE, AttentionFunction, Extras, Rule
from megatron.core.mesh import Axis
from megatron.core.utils import divide

Exchange = Callable[[Tensor, Axis], Tensor]


def ulysses_attention(
    q_sBnD: Tensor,
    k_sBgD: Tensor,
    v_sBgE: Tensor,
    rule: Rule,
    extras: Extras = NONE,
    *,
    axis: Axis,
    attend: AttentionFunction,
) -> Tensor:
    """Return what `ring_attention` returns; ``attend`` sees n / a heads of a * s positions."""
    assert extras.bias is None and extras.query_positions_BS is None, "refused, or not cut"
    heads = divide(q_sBnD.shape[2], axis.size)
    # The least number of key heads that every rank gets an equal part of; it divides n, as both do.
    copies = math.lcm(k_sBgD.shape[2], axis.size) // k_sBgD.shape[2]
    if copies > 1:
        k_sBgD, v_sBgE = (x.repeat_interleave(copies, 2) for x in (k_sBgD, v_sBgE))
    parts = [_by_rank(x, axis.size) for x in (q_sBnD, k_sBgD, v_sBgE)]
    if q_sBnD.shape[0] == k_sBgD.shape[0]:
        q, k, v = _exchanged(parts, axis)
    else:  # keys of another sequence
        (q,), (k, v) = _exchanged(parts[:1], axis), _exchanged(parts[1:], axis)
    sizes = (q_sBnD.shape[3], k_sBgD.shape[3], v_sBgE.shape[3])
    q, k, v = (x.unflatten(-1, (-1, size)) for x, size in zip((q, k, v), sizes, strict=True))
    out_SBX = attend(q, k, v, rule, _own_heads(extras, axis, heads)).flatten(2)
    out_asBX = _Exchanged.apply(out_SBX, axis, to_sequence, to_heads)
    return out_asBX.movedim(0, 2).reshape(*q_sBnD.shape[:3], -1)  # type: ignore[no-any-return]


def _exchanged(parts: list[Tensor], axis: Axis) -> Sequence[Tensor]:
    """Return [S, B, X] of each part, sent together."""
    together = _Exchanged.apply(torch.cat(parts, -1), axis, to_heads, to_sequence)
    return together.split([x.shape[-1] for x in parts], -1)  # type: ignore[no-any-return]


def to_heads(x_asBX: Tensor, axis: Axis) -> Tensor:
    """Send slice i to rank i; return what came, [S, B, X], in order of position."""
    return unzigzag(comm.all_to_all(x_asBX, axis).flatten(0, 1), axis.size)


def to_sequence(x_SBX: Tensor, axis: Axis) -> Tensor:
    """Send each rank its positions of ``x``; return what came, slice i from rank i."""
    return comm.all_to_all(zigzag(x_SBX, axis.size).unflatten(0, (axis.size, -1)), axis)


class _Exchanged(torch.autograd.Function):
    """One of the two exchanges; each is a permutation, whose transpose is the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, forward: Exchange, back: Exchange) -> Tensor:
        ctx.axis, ctx.back = axis, back
        return forward(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grads[0].contiguous(), ctx.axis), None, None, None


def _by_rank(x_sBnD: Tensor, size: int) -> Tensor:
    """Return [a, s, B, X]: the channels of each rank's heads."""
    x_sBarD: Tensor = x_sBnD.unflatten(2, (size, -1))
    return x_sBarD.movedim(2, 0).flatten(3)


def _own_heads(extras: Extras, axis: Axis, heads: int) -> Extras:
    own = slice(axis.coordinate * heads, (axis.coordinate + 1) * heads)
    sink, slopes = extras.sink_n, extras.alibi_slopes_n
    return replace(
        extras,
        sink_n=None if sink is None else sink[own],
        alibi_slopes_n=None if slopes is None else slopes[own],
    )
