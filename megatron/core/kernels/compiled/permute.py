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
from megatron.core.kernels.compiled.arrays import address, cpu_kernels, threads
from megatron.core.kernels.permute import Moves, Sorted


def permute(x_TH: Tensor, by: Sorted) -> Tensor:
    """Return what `permute.permute` returns."""
    return _Permute.apply(x_TH, by)  # type: ignore[no-any-return]


def unpermute(y_NH: Tensor, weights_TK: Tensor, by: Sorted) -> Tensor:
    """Return what `permute.unpermute` returns."""
    if weights_TK.dtype != y_NH.dtype:
        return permute_in_places.unpermute(y_NH, weights_TK, by)
    return _Unpermute.apply(y_NH, weights_TK, by)  # type: ignore[no-any-return]


MOVES = Moves(permute, unpermute)


def _sum(x_NH: Tensor, weights_TK: Tensor | None, places_TK: Tensor) -> Tensor:
    (N, H), (T, K) = x_NH.shape, places_TK.shape
    y_TH = x_NH.new_empty(T, H)
    weights = address(weights_TK, like=x_NH)
    arrays = (address(x_NH), weights, address(places_TK), address(y_TH))
    cpu_kernels.sum(x_NH.element_size(), *arrays, T, K, N, H, threads())
    return y_TH


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, by: Sorted) -> Tensor:
        x_TH, places_TK = x_TH.contiguous(), by.places_TK.contiguous()
        ctx.save_for_backward(places_TK)
        (T, K), N, H = places_TK.shape, len(by.tokens_N), x_TH.shape[1]
        y_NH = x_TH.new_empty(N, H)
        arrays = (address(x_TH), address(places_TK), address(y_NH))
        cpu_kernels.scatter(x_TH.element_size(), *arrays, T, K, N, H, threads())
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
        (T, K), (N, H) = places_TK.shape, y_NH.shape
        inputs = (address(y_NH), address(weights_TK), address(places_TK), address(grad_TH))
        results = (address(dy_NH), address(dw_TK))
        cpu_kernels.sum_gradient(y_NH.element_size(), *inputs, *results, T, K, N, H, threads())
        return dy_NH, dw_TK, None
