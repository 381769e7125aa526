"""Ring attention: keys and values travel round the ranks, each rank's queries stay.

    forward     n - 1 shifts of k and v
    backward    n - 1 shifts of k and v, and as many of their gradients, summed in at least fp32

The next keys travel while the present ones are multiplied. A gradient starts at the first rank that
is not its keys' own, follows them, and comes home with the last shift; what a rank's own queries
give stays there. A rank holds its share of the sequence and, while it works, two more of k and v.

(Liu et al., 2023; zig-zag: Brandon et al., 2023.)
"""

from typing import Any

import torch
from torch import Tensor

from megatron.core import comm
from megatron.core.context_parallel.share import Seen, begin, end, gradients, resume
from megatron.core.kernels.attention import NONE, Extras, Rule
from megatron.core.mesh import Axis


def ring_attention(
    q_sBnD: Tensor,
    k_sBgD: Tensor,
    v_sBgE: Tensor,
    rule: Rule,
    extras: Extras = NONE,
    *,
    axis: Axis,
) -> Tensor:
    """Return out_sBnE of this rank's queries over the whole sequence's keys.

    Every rank of ``axis`` holds the positions that `partition.spans` gives it. The gradient of a
    sink is this rank's part.
    """
    out: Tensor = _Ring.apply(q_sBnD, k_sBgD, v_sBgE, extras.sink_n, rule, extras, axis)
    return out


class _Ring(torch.autograd.Function):
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
        kv = own
        for step in range(axis.size):
            last = step == axis.size - 1
            following = None if last else comm.shift(kv, axis)
            share.see(kv, (axis.coordinate - step) % axis.size, seen)
            if following is not None:
                kv = following.wait()
        return end(ctx, share, own, sink, seen)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        share, kv, rows, grad_sink = resume(ctx, grad_out)
        axis = share.axis
        home = travelling = None
        for step in range(axis.size):
            last = step == axis.size - 1
            following = None if last else comm.shift(kv, axis)
            grad_kv = share.no_gradient(kv)
            share.back(kv, (axis.coordinate - step) % axis.size, rows, grad_kv)
            if home is None:
                home = grad_kv
            else:
                if travelling is not None:
                    grad_kv += travelling.wait()
                # Under way during the next block.
                travelling = comm.shift(grad_kv, axis)
            if following is not None:
                kv = following.wait()
        assert home is not None
        if travelling is not None:
            home += travelling.wait()
        return (*gradients(share, rows, home), grad_sink, None, None, None)
