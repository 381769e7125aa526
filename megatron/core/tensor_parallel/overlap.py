"""Sequence-parallel collectives that run beside the matrix product they belong to.

    gather_product      all-gather, then product        of a column-parallel layer's input
    product_scatter     product, then reduce-scatter    of a row-parallel layer's output

Each has three forms, chosen by the axis (`Axis.overlap`), with one result but for rounding:

    None        the collective, then (or before) the product, each whole
    ring        in as many pieces as there are ranks: a piece is multiplied while the next one
                travels round the ranks (Wang et al., 2023, "Overlap communication with dependent
                computation via decomposition")
    symmetric   torch's fused operators over symmetric memory; CUDA only. These have not run yet:
                no machine with several GPUs was there.

A ring moves the same bytes: n - 1 shares where a collective's payload is n.

Shapes: S positions, s = S / n of this rank, B batch, I inner features, O outer features.
"""

import torch
from torch import Tensor

from megatron.core import comm
from megatron.core.kernels import matmul
from megatron.core.mesh import Axis


def gather_product(x_sBI: Tensor, b_IO: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """Return x_SBI, the shares of all ranks along dim 0, and x_SBI @ b_IO."""
    if axis.overlap == "symmetric":
        x_SBI, (y_SBO,) = torch.ops.symm_mem.fused_all_gather_matmul(
            x_sBI.contiguous(), [b_IO], 0, _group_name(axis)
        )
        return x_SBI, y_SBO
    if axis.overlap == "ring":
        return _ring_gather_product(x_sBI.contiguous(), b_IO, axis)
    x_SBI = comm.all_gather(x_sBI, axis)
    return x_SBI, matmul.matmul(x_SBI, b_IO)


def product_scatter(x_SBI: Tensor, b_IO: Tensor, axis: Axis) -> Tensor:
    """Return this rank's share along dim 0 of the sum over ranks of x_SBI @ b_IO.

    S must be a multiple of the axis's size; nothing here checks it.
    """
    if axis.overlap == "symmetric":
        y_sBO: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(
            x_SBI.contiguous(), b_IO, "sum", 0, _group_name(axis)
        )
        return y_sBO
    if axis.overlap == "ring":
        return _ring_product_scatter(x_SBI, b_IO, axis)
    return comm.reduce_scatter(matmul.matmul(x_SBI, b_IO), axis)


def _ring_gather_product(x_sBI: Tensor, b_IO: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    pieces: list[Tensor] = [x_sBI] * axis.size
    products: list[Tensor] = [x_sBI] * axis.size
    piece = x_sBI
    for step in range(axis.size):
        last = step == axis.size - 1
        following = None if last else comm.shift(piece, axis)
        source = (axis.coordinate - step) % axis.size
        pieces[source], products[source] = piece, matmul.matmul(piece, b_IO)
        if following is not None:
            piece = following.wait()
    return torch.cat(pieces), torch.cat(products)


def _ring_product_scatter(x_SBI: Tensor, b_IO: Tensor, axis: Axis) -> Tensor:
    """The sum for a rank starts at the rank after it and comes home with the last step."""
    shares = x_SBI.chunk(axis.size)
    arriving = None
    for step in range(axis.size):
        target = (axis.coordinate - 1 - step) % axis.size
        part = matmul.matmul(shares[target], b_IO)
        if arriving is not None:
            part += arriving.wait()
        if step < axis.size - 1:
            arriving = comm.shift(part, axis)
    return part


def _group_name(axis: Axis) -> str:
    assert axis.group is not None
    return axis.group.group_name
