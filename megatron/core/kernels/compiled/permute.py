"""Rows that change places in one pass each way; `kernels.permute` is the reference.

    permute     x -> rows                   dx = sum of the gradients of a token's rows
    unpermute   rows, weights -> sum        drow = weight grad, dweight = row . grad

Shapes: T tokens, K choices of each, N rows, H width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.kernels import permute_in_places
from megatron.core.kernels.compiled.arrays import address, cpu_kernels, is_memory, real, threads
from megatron.core.kernels.permute import Moves, Sorted


def permute(x_TH: Tensor, by: Sorted) -> Tensor:
    """Return what `permute.permute` returns."""
    if not is_memory(x_TH):
        return permute_in_places.permute(x_TH, by)
    return _Permute.apply(x_TH, by)  # type: ignore[no-any-return]


def unpermute(y_NH: Tensor, weights_TK: Tensor, by: Sorted) -> Tensor:
    """Return what `permute.unpermute` returns."""
    if weights_TK.dtype != y_NH.dtype or not is_memory(y_NH):
        return permute_in_places.unpermute(y_NH, weights_TK, by)
    return _Unpermute.apply(y_NH, weights_TK, by)  # type: ignore[no-any-return]


MOVES = Moves(permute, unpermute)


def _sum(x_NH: Tensor, weights_TK: Tensor | None, places_TK: Tensor) -> Tensor:
    (N, H), (T, K), dtype = x_NH.shape, places_TK.shape, real(x_NH)
    y_TH = x_NH.new_empty(T, H)
    cpu_kernels.gather_sum(
        dtype.itemsize,
        address(x_NH, N, H, dtype=dtype),
        address(weights_TK, T, K, dtype=dtype),
        address(places_TK, T, K, dtype=torch.int64),
        address(y_TH, T, H, dtype=dtype),
        *(T, K, N, H),
        threads(),
    )
    return y_TH


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, by: Sorted) -> Tensor:
        x_TH, places_TK = x_TH.contiguous(), by.places_TK.contiguous()
        ctx.save_for_backward(places_TK)
        (T, K), N, H, dtype = places_TK.shape, len(by.order_N), x_TH.shape[1], real(x_TH)
        y_NH = x_TH.new_empty(N, H)
        cpu_kernels.scatter(
            dtype.itemsize,
            address(x_TH, T, H, dtype=dtype),
            address(places_TK, T, K, dtype=torch.int64),
            address(y_NH, N, H, dtype=dtype),
            *(T, K, N, H),
            threads(),
        )
        return y_NH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NH: Tensor) -> tuple[Tensor, None]:
        return _sum(grad_NH.contiguous(), None, *ctx.saved_tensors), None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_NH: Tensor, weights_TK: Tensor, by: Sorted) -> Tensor:
        saved = (y_NH.contiguous(), weights_TK.contiguous(), by.places_TK.contiguous())
        ctx.save_for_backward(*saved)
        return _sum(*saved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, Tensor, None]:
        y_NH, weights_TK, places_TK = ctx.saved_tensors
        grad_TH = grad_TH.contiguous()
        dy_NH, dw_TK = torch.empty_like(y_NH), torch.empty_like(weights_TK)
        (T, K), (N, H), dtype = places_TK.shape, y_NH.shape, real(y_NH)
        cpu_kernels.gather_sum_gradient(
            dtype.itemsize,
            address(y_NH, N, H, dtype=dtype),
            address(weights_TK, T, K, dtype=dtype),
            address(places_TK, T, K, dtype=torch.int64),
            address(grad_TH, T, H, dtype=dtype),
            address(dy_NH, N, H, dtype=dtype),
            address(dw_TK, T, K, dtype=dtype),
            *(T, K, N, H),
            threads(),
        )
        return dy_NH, dw_TK, None
