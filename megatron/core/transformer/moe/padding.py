"""Experts that work on equally many rows each, whatever came: shapes that no routing changes.

With a capacity an expert gets so many rows of a microbatch at most; rows of zeros fill it up. What
is computed of them is thrown away, so that results and gradients are those without.

Shapes: N rows that came, M rows with those that were added, H hidden.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.transformer.moe.dispatcher import Compute


def padded(compute: Compute, limit: int) -> Compute:
    """Return ``compute`` with every expert's rows filled up to ``limit``.

    Args:
        compute: of the experts of a rank.
        limit: rows that an expert gets at most; one that gets more after all sets the size of all.
    """

    def run(x_NH: Tensor, sizes: Sequence[int]) -> Tensor:
        size = max(limit, *sizes)
        experts = torch.arange(len(sizes), device=x_NH.device)
        # Without waiting for all that the device has under way.
        counts = torch.tensor(sizes).to(x_NH.device, non_blocking=True)
        expert_N = experts.repeat_interleave(counts, output_size=len(x_NH))
        first_N = (counts.cumsum(0) - counts)[expert_N]
        place_N = expert_N * size + torch.arange(len(x_NH), device=x_NH.device) - first_N
        x_MH = _Fill.apply(x_NH, place_N, size * len(sizes))
        return compute(x_MH, [size] * len(sizes)).index_select(0, place_N)

    return run


class _Fill(torch.autograd.Function):
    """Rows at their places among zeros; torch's own op would keep them for backward."""

    @staticmethod
    def forward(ctx: Any, x_NH: Tensor, place_N: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(place_N)
        return x_NH.new_zeros(rows, x_NH.shape[1]).index_copy_(0, place_N, x_NH)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, *ctx.saved_tensors), None, None
