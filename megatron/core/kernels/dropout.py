"""Dropout, and what a block adds to the residual stream: residual + dropout(y + bias).

A mask is a function of a seed; two generators draw one. `dropout` uses torch's, which is the
quickest on the CPU and keeps a byte per element for backward. The fused forms count (`philox`): on
a GPU that costs no memory, and every backend that counts draws the same mask. So the same seed
gives other masks with and without fusion, and the same ones on every layout either way.

Shapes: N rows (every leading dim), H hidden.
"""

from typing import Any

import torch
from torch import Tensor

from megatron.core.kernels.dtypes import accumulate_dtype
from megatron.core.kernels.philox import keep_mask


def dropout(x: Tensor, p: float, seed: int) -> Tensor:
    """Zero each element with probability ``p`` and scale the rest by 1 / (1 - p)."""
    return _Dropout.apply(x, p, seed)  # type: ignore[no-any-return]


class _Dropout(torch.autograd.Function):
    """Dropout that keeps one byte per element for backward, whatever the dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, seed: int) -> Tensor:
        generator = torch.Generator(x.device).manual_seed(seed)
        # Contiguous: a mask in the order of x's strides would differ where another layout has x
        # in another order.
        kept = torch.empty_like(x, memory_format=torch.contiguous_format)
        kept.bernoulli_(1 - p, generator=generator)
        ctx.p = p
        ctx.save_for_backward(kept.bool())
        return x * kept.div_(1 - p)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (kept,) = ctx.saved_tensors
        return grads[0] * kept.to(grads[0].dtype).div_(1 - ctx.p), None, None


def bias_dropout_add_reference(
    y_NH: Tensor, bias_H: Tensor | None, residual_NH: Tensor, p: float, seed: int
) -> Tensor:
    """Return residual + dropout(y + bias), rounded once, in the wider of the two dtypes.

    Args:
        y_NH: what a block gives.
        bias_H: of the block's last layer; None for none.
        residual_NH: what it is added to.
        p: probability of dropping an element; 0 drops nothing and reads no seed.
        seed: key of the mask that `philox.keep_mask` draws.
    """
    dtype = accumulate_dtype(torch.promote_types(y_NH.dtype, residual_NH.dtype))
    z_NH = y_NH.to(dtype) if bias_H is None else y_NH.to(dtype) + bias_H.to(dtype)
    if p:
        rows = y_NH.numel() // max(y_NH.shape[-1], 1)
        kept_NH = keep_mask(rows, y_NH.shape[-1], p, seed, y_NH.device).view(y_NH.shape)
        z_NH = torch.where(kept_NH, z_NH / (1 - p), 0.0)
    out_NH = residual_NH.to(dtype) + z_NH
    return out_NH.to(torch.promote_types(y_NH.dtype, residual_NH.dtype))


def bias_dropout_add(
    y_NH: Tensor, bias_H: Tensor | None, residual_NH: Tensor, p: float, seed: int
) -> Tensor:
    """Return residual + dropout(y + bias), one operation of torch after the other.

    The mask is torch's, as in `dropout`.
    """
    if bias_H is not None:
        y_NH = y_NH + bias_H
    return residual_NH + (dropout(y_NH, p, seed) if p else y_NH)
