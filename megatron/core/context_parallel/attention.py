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
from megatron.core.mesh import Axis


@dataclass(frozen=True)
class ContextAxes:
    """The context-parallel axis, and the two that ``a2a+p2p`` parts it into (`mesh.Mesh`)."""

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
    if inner.size == 1:
        return partial(ring_attention, axis=axes.whole)
    ring = attend if outer.size == 1 else partial(ring_attention, axis=outer)
    return partial(ulysses_attention, axis=inner, attend=ring)
