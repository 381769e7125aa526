"""Attention over gathered keys: every rank sees all keys and values at once, its queries stay.

    forward     all-gather of k and v
    backward    all-gather of k and v again, reduce-scatter of their gradients (at least fp32)

One large collective in place of the ring's many small ones, at the price of all keys and values in
memory while the layer works; between forward and backward a rank holds its share alone.

(Dubey et al., 2024, section 3.3.2.)
"""

from typing import Any

import torch
from torch import Tensor

from megatron.core import comm
from megatron.core.context_parallel.share import Seen, begin, end, gradients, resume
from megatron.core.kernels.attention import NONE, Extras, Rule
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
    out: Tensor = _Gathered.apply(q_sBnD, k_sBgD, v_sBgE, extras.sink_n, rule, extras, axis)
    return out


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        rule: Rule,
        extras: Extras,
        axis: Axis,
    ) -> Tensor:
        share, own = begin(ctx, q, k, v, rule, extras, axis)
        seen: Seen = {}
        for source, kv in enumerate(comm.all_gather(own, axis).chunk(axis.size)):
            share.see(kv, source, seen)
        return end(ctx, share, own, sink, seen)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        share, own, rows, grad_sink = resume(ctx, grad_out)
        axis = share.axis
        everyone = comm.all_gather(own, axis)
        grads = share.no_gradient(everyone)
        parts = zip(everyone.chunk(axis.size), grads.chunk(axis.size), strict=True)
        for source, (kv, grad_kv) in enumerate(parts):
            share.back(kv, source, rows, grad_kv)
        home = comm.reduce_scatter(grads, axis)
        return (*gradients(share, rows, home), grad_sink, None, None, None)
