"""Rows that change places, known by the place of each choice alone; `permute` is the reference.

One pass over the rows each way, and a backward that keeps ``places_TK``: the order of the rows is
its inverse, made again where it is needed. On the CPU, in fp32 and fp64, a weighted sum of rows is
one `embedding_bag`; elsewhere it is the reference's.

    permute     x -> rows                   dx = sum of the gradients of a token's rows
    unpermute   rows, weights -> sum        drow = weight grad, dweight = row . grad, of one gather

Shapes: T tokens, K choices of each, N rows, H width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.kernels import permute as reference
from megatron.core.kernels.dtypes import accumulate_dtype
from megatron.core.kernels.permute import Moves, Sorted

IN_ONE_CALL = (torch.float32, torch.float64)


def permute(x_TH: Tensor, by: Sorted) -> Tensor:
    """Return what `permute.permute` returns."""
    return _Permute.apply(x_TH, by)  # type: ignore[no-any-return]


def unpermute(y_NH: Tensor, weights_TK: Tensor, by: Sorted) -> Tensor:
    """Return what `permute.unpermute` returns."""
    return _Unpermute.apply(y_NH, weights_TK, by)  # type: ignore[no-any-return]


MOVES = Moves(permute, unpermute)


def _sum(x_NH: Tensor, weights_TK: Tensor | None, places_TK: Tensor) -> Tensor:
    """Return the (weighted) sum over each token's rows, in fp32 or finer."""
    dtypes = {x_NH.dtype} if weights_TK is None else {x_NH.dtype, weights_TK.dtype}
    if x_NH.device.type != "cpu" or len(dtypes) > 1 or x_NH.dtype not in IN_ONE_CALL:
        return reference.gathered_sum(x_NH, weights_TK, places_TK)
    rows = reference.with_zero(x_NH, places_TK)
    return F.embedding_bag(places_TK, rows, mode="sum", per_sample_weights=weights_TK)


def _sorted(places_TK: Tensor, rows: int) -> Sorted:
    """Return the sorting that gave choices their places among ``rows``."""
    places = places_TK.flatten()
    # All choices without a row share the last place.
    order = torch.empty(rows + 1, dtype=places.dtype, device=places.device)
    order[places] = torch.arange(places.numel(), device=places.device)
    return Sorted(order[:rows], places_TK, places_TK.shape[1], rows == places.numel())


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, by: Sorted) -> Tensor:
        ctx.save_for_backward(by.places_TK)
        return x_TH.index_select(0, by.tokens_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (places_TK,), (grad_NH,) = ctx.saved_tensors, grads
        return _sum(grad_NH, None, places_TK).to(grad_NH.dtype), None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_NH: Tensor, weights_TK: Tensor, by: Sorted) -> Tensor:
        ctx.save_for_backward(y_NH, weights_TK, by.places_TK)
        return _sum(y_NH, weights_TK, by.places_TK).to(y_NH.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (y_NH, weights_TK, places_TK), (grad_TH,) = ctx.saved_tensors, grads
        by, wide = _sorted(places_TK, len(y_NH)), accumulate_dtype(y_NH.dtype)
        rows_NH = grad_TH.index_select(0, by.tokens_N).to(wide)
        dw_N = torch.linalg.vecdot(rows_NH, y_NH.to(wide)).to(weights_TK.dtype)
        dw_TK = torch.zeros_like(weights_TK)
        dw_TK.view(-1).index_copy_(0, by.order_N, dw_N)
        weights_N = weights_TK.flatten().index_select(0, by.order_N)
        return rows_NH.mul_(weights_N[:, None]).to(y_NH.dtype), dw_TK, None
