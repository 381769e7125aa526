"""Attention over gathered keys: every rank sees all keys and values at once, its queries stay.

    forward     all-gather of k and v
    backward    all-gather of k and v again, reduce-scatter of their gradients (at least fp32)

One large collective in place of the ring's many small ones, at the price of all keys and values in
memory while the layer works; between forward and backward a rank holds its share alone.

(Dubey et al., 2024, section 3.3.2.)

Shapes: s positions of a rank, B batch, n heads, g query groups, D head size, E value head size,
X = D + E.
"""

from torch import Tensor

from megatron.core import comm, held
from megatron.core.context_parallel.share import Exchange, Seen, Share, attend
from megatron.core.kernels.attention import NONE, Extras, Rule
from megatron.core.kernels.ring_block import Rows
from megatron.core.mesh import Axis


def gathered_attention(
    q_sBnD: Tensor,
    k_sBgD: Tensor,
    v_sBgE: Tensor,
    rule: Rule,
    extras: Extras = NONE,
    *,
    axis: Axis,
) -> Tensor:
    """Return what `ring_attention` returns."""
    return attend(q_sBnD, k_sBgD, v_sBgE, rule, extras, Exchange(axis, _forward, _backward))


def _forward(share: Share, kv_BgsX: Tensor, seen: Seen) -> None:
    axis = share.axis
    for source, part_BgsX in enumerate(comm.all_gather(kv_BgsX, axis).chunk(axis.size)):
        share.see(part_BgsX, source, seen)


def _backward(share: Share, kv_BgsX: Tensor, rows: Rows) -> Tensor:
    axis = share.axis
    # Every rank's, one after the other along the batch.
    everyone = comm.all_gather(kv_BgsX, axis)
    grads = share.no_gradient(everyone)
    held.see(grads)
    parts = zip(everyone.chunk(axis.size), grads.chunk(axis.size), strict=True)
    for source, (part_BgsX, grad_BgsX) in enumerate(parts):
        share.back(part_BgsX, source, rows, grad_BgsX)
    return comm.reduce_scatter(grads, axis)
