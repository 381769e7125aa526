"""Rows that change places: tokens sorted by expert, and outputs joined again.

Each direction reads rows by index, forward and backward: nothing is scattered, so that sums have a
fixed order on every device.

Shapes: T tokens, K choices of each, E experts, N rows after sorting (of the choices that stay), H
width. A row belongs to one choice; ``places_TK`` says where each choice's row is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.kernels.dtypes import accumulate_dtype


@dataclass(frozen=True)
class Sorted:
    """Choices in the order of their experts; of one expert in the order of tokens."""

    order_N: Tensor
    """Number t K + k of each row's choice, int64."""
    places_TK: Tensor
    """Row of each choice, int64; N for one that has none."""
    num_choices: int
    """K."""
    is_complete: bool
    """Every choice has a row."""

    @property
    def tokens_N(self) -> Tensor:
        """Return the token of each row, int64."""
        return self.order_N.div(self.num_choices, rounding_mode="floor")


def sort_choices(experts_TK: Tensor, kept_TK: Tensor | None, count: int) -> Sorted:
    """Return the choices sorted by expert, without those that are not kept.

    Args:
        experts_TK: chosen experts, int64.
        kept_TK: which choices stay, bool; None for all.
        count: how many stay.
    """
    choices = experts_TK.flatten()
    if kept_TK is not None:
        # What goes is sorted behind everything that stays.
        choices = choices.masked_fill(~kept_TK.flatten(), torch.iinfo(choices.dtype).max)
    order = choices.argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel(), device=order.device)
    is_complete = count == order.numel()
    if not is_complete:
        places = places.clamp(max=count)
    return Sorted(order[:count], places.view_as(experts_TK), experts_TK.shape[1], is_complete)


def permute(x_TH: Tensor, by: Sorted) -> Tensor:
    """Return the token of each row, ``[N, H]``."""
    return _Permute.apply(x_TH, by)  # type: ignore[no-any-return]


def unpermute(y_NH: Tensor, weights_TK: Tensor, by: Sorted) -> Tensor:
    """Return for each token the weighted sum of its rows, ``[T, H]``, in their dtype.

    Sums are made in fp32 or finer, in the order of the choices. ``weights_TK`` has a gradient too.
    """
    return _Unpermute.apply(y_NH, weights_TK, by)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Moves:
    """One implementation of the ways there and back."""

    permute: Callable[[Tensor, Sorted], Tensor]
    unpermute: Callable[[Tensor, Tensor, Sorted], Tensor]


REFERENCE = Moves(permute, unpermute)


def rearrange(x_NH: Tensor, order_N: Tensor) -> Tensor:
    """Return the rows of ``x`` in another order, which holds each row once."""
    return _Rearrange.apply(x_NH, order_N)  # type: ignore[no-any-return]


def inverse(order_N: Tensor) -> Tensor:
    """Return the order that undoes another."""
    back = torch.empty_like(order_N)
    back[order_N] = torch.arange(order_N.numel(), device=order_N.device)
    return back


def with_zero(x_NH: Tensor, places_TK: Tensor) -> Tensor:
    """Return the rows with one of zeros behind them, where choices without a row find it."""
    if len(x_NH) == places_TK.numel():
        return x_NH
    return torch.cat((x_NH, x_NH.new_zeros(1, x_NH.shape[1])))


def gathered_sum(x_NH: Tensor, weights_TK: Tensor | None, places_TK: Tensor) -> Tensor:
    """Return the sum over each token's rows, in fp32 or finer."""
    wide, rows = accumulate_dtype(x_NH.dtype), with_zero(x_NH, places_TK)
    total = None
    for k in range(places_TK.shape[1]):
        part = rows.index_select(0, places_TK[:, k]).to(wide)
        if weights_TK is not None:
            part = part * weights_TK[:, k, None]
        total = part if total is None else total.add_(part)
    assert total is not None, "tokens without choices"
    return total


class _Kept:
    """Keeps a sorting for backward, its tensors with those that autograd saves."""

    def __init__(self, ctx: Any, by: Sorted, *more: Tensor) -> None:
        ctx.save_for_backward(by.order_N, by.places_TK, *more)
        self._num_choices, self._is_complete = by.num_choices, by.is_complete

    def sorted(self, order_N: Tensor, places_TK: Tensor) -> Sorted:
        """Return it with the tensors that were saved."""
        return Sorted(order_N, places_TK, self._num_choices, self._is_complete)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, by: Sorted) -> Tensor:
        ctx.by = _Kept(ctx, by)
        return x_TH.index_select(0, by.tokens_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        by = ctx.by.sorted(*ctx.saved_tensors)
        return gathered_sum(grads[0], None, by.places_TK).to(grads[0].dtype), None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_NH: Tensor, weights_TK: Tensor, by: Sorted) -> Tensor:
        ctx.by = _Kept(ctx, by, y_NH, weights_TK)
        return gathered_sum(y_NH, weights_TK, by.places_TK).to(y_NH.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        *numbers, y_NH, weights_TK = ctx.saved_tensors
        by, (grad_TH,) = ctx.by.sorted(*numbers), grads
        dy_NH = dw_TK = None
        if ctx.needs_input_grad[0]:
            weights_N = weights_TK.flatten().index_select(0, by.order_N)
            rows_NH = grad_TH.index_select(0, by.tokens_N)
            dy_NH = (rows_NH * weights_N[:, None]).to(y_NH.dtype)
        if ctx.needs_input_grad[1]:
            wide, rows = accumulate_dtype(y_NH.dtype), with_zero(y_NH, by.places_TK)
            columns = [
                (rows.index_select(0, by.places_TK[:, k]).to(wide) * grad_TH).sum(1)
                for k in range(by.num_choices)
            ]
            dw_TK = torch.stack(columns, 1).to(weights_TK.dtype)
        return dy_NH, dw_TK, None


class _Rearrange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NH: Tensor, order_N: Tensor) -> Tensor:
        ctx.save_for_backward(order_N)
        return x_NH.index_select(0, order_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].index_select(0, inverse(ctx.saved_tensors[0])), None
