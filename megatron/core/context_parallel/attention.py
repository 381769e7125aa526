"""Attention over a sequence that is cut over ranks: one signature, four ways to communicate.

    p2p         keys travel round a ring, one hop at a time (`ring`)
    all_gather  keys are gathered (`all_gather`)
    a2a         heads are traded for positions (`ulysses`)
    a2a+p2p     heads are traded within groups of near ranks, keys travel between the groups

Each is an `AttentionFunction` over this rank's positions (`partition.spans`) whose documents and
masks are those of the whole sample, so that a layer chooses once and calls it as any other.
"""

from dataclasses import dataclass
from functools import partial

from megatron.core.context_parallel.all_gather import gathered_attention
from megatron.core.context_parallel.checks import KINDS
from megatron.core.context_parallel.ring import ring_attention
from megatron.core.context_parallel.ulysses import ulysses_attention
from megatron.core.kernels.attention import AttentionFunction
from megatron.core.mesh import Axis, bind


@dataclass(frozen=True)
class ContextAxes:
    """The context-parallel axis, and the two that ``a2a+p2p`` parts it into."""

    whole: Axis
    inner: Axis | None = None
    """Neighbouring coordinates: the ranks of an all-to-all."""
    outer: Axis | None = None
    """Coordinates one inner size apart: the ranks of a ring."""


def context_attention(kind: str, axes: ContextAxes, attend: AttentionFunction) -> AttentionFunction:
    """Return the attention of one layer for a value of --cp-comm-type.

    ``attend`` is the layer's attention of whole samples: it serves where an all-to-all has brought
    them together, and alone where the axis has size 1.
    """
    assert kind in KINDS, kind
    if axes.whole.size == 1:
        return attend
    if kind == "p2p":
        return partial(ring_attention, axis=axes.whole)
    if kind == "all_gather":
        return partial(gathered_attention, axis=axes.whole)
    if kind == "a2a":
        return partial(ulysses_attention, axis=axes.whole, attend=attend)
    inner, outer = axes.inner, axes.outer
    assert inner is not None and outer is not None, "a2a+p2p needs both of its axes"
    ring = attend if outer.size == 1 else partial(ring_attention, axis=outer)
    if inner.size == 1:
        return ring
    return partial(ulysses_attention, axis=inner, attend=ring)


def split_axis(groups: list[tuple[int, ...]], axis: Axis, inner: int) -> ContextAxes:
    """Make the two axes of ``a2a+p2p``; a collective of the whole world (`mesh.bind`).

    The inner axis's groups are made first, then the outer's, after those of the mesh.

    Args:
        groups: the ranks of every context-parallel group of the world, in one order on all ranks.
        axis: this rank's.
        inner: ranks of an all-to-all.
    """
    outer = axis.size // inner
    assert inner * outer == axis.size and axis.ranks in groups, f"{axis} into {inner}"
    near = [ranks[i * inner : (i + 1) * inner] for ranks in groups for i in range(outer)]
    far = [ranks[i::inner] for ranks in groups for i in range(inner)]
    me = axis.ranks[axis.coordinate]
    parts = (bind(f"{axis.name}_inner", near, me), bind(f"{axis.name}_outer", far, me))
    return ContextAxes(axis, *parts)
