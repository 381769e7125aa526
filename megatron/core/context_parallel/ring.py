"""Ring attention: keys and values travel round the ranks, each rank's queries stay.

    forward     n - 1 shifts of k and v
    backward    n - 1 shifts of k and v, and as many of their gradients, summed in at least fp32

The next keys travel while the present ones are multiplied. A gradient starts at the first rank that
is not its keys' own, follows them, and comes home with the last shift; what a rank's own queries
give stays there. A rank holds its share of the sequence and, while it works, two more of k and v.

(Liu et al., 2023; zig-zag: Brandon et al., 2023.)

Shapes: s positions of a rank, B batch, n heads, g query groups, D head size, E value head size,
X = D + E.
"""

from torch import Tensor

from megatron.core import comm
from megatron.core.context_parallel.share import Exchange, Seen, Share, attend
from megatron.core.kernels.attention import NONE, Extras, Rule
from megatron.core.kernels.ring_block import Rows
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
    return attend(q_sBnD, k_sBgD, v_sBgE, rule, extras, Exchange(axis, _forward, _backward))


def _forward(share: Share, kv_BgsX: Tensor, seen: Seen) -> None:
    axis = share.axis
    for step in range(axis.size):
        last = step == axis.size - 1
        following = None if last else comm.shift(kv_BgsX, axis)
        share.see(kv_BgsX, (axis.coordinate - step) % axis.size, seen)
        if following is not None:
            kv_BgsX = following.wait()


def _backward(share: Share, kv_BgsX: Tensor, rows: Rows) -> Tensor:
    axis = share.axis
    home_BgsX = travelling = None
    for step in range(axis.size):
        last = step == axis.size - 1
        following = None if last else comm.shift(kv_BgsX, axis)
        grad_kv_BgsX = share.no_gradient(kv_BgsX)
        share.back(kv_BgsX, (axis.coordinate - step) % axis.size, rows, grad_kv_BgsX)
        if home_BgsX is None:
            home_BgsX = grad_kv_BgsX
        else:
            if travelling is not None:
                grad_kv_BgsX += travelling.wait()
            # Under way during the next block.
            travelling = comm.shift(grad_kv_BgsX, axis)
        if following is not None:
            kv_BgsX = following.wait()
    assert home_BgsX is not None
    if travelling is not None:
        home_BgsX += travelling.wait()
    return home_BgsX
