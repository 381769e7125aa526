"""The two halves of a softmax cross entropy that belong to one rank's share of the vocabulary.

`tensor_parallel.cross_entropy` reduces the statistics over ranks, between forward and backward:

    statistics:  largest = max_j x_j      total = sum_j exp(x_j - largest)
                 target = x_label         summed = sum_j x_j
    gradient:    dx_j = grad * (softmax_j - spread) - own * [j == label]
                 softmax_j = exp(x_j - largest) / divisor

over this rank's own logits; ``divisor`` holds what the other ranks' logits make of them, ``spread``
and ``own`` what label smoothing does. Columns that only pad the vocabulary are left out of every
sum and get no gradient.

What `Kernels.statistics` keeps for the gradient may be memory of the logits themselves, which
nobody may read after it: so one matrix of that size is alive (Shoeybi et al., 2019, section 3).

Shapes: N tokens, v columns on this rank.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.kernels.dtypes import accumulate_dtype

SLAB = 2**18
"""Logits that a CPU finishes before it goes on to the next ones: so many stay in its cache."""


class Statistics(NamedTuple):
    """What a rank knows of its own logits, in fp32 or better."""

    largest_N: Tensor
    """-inf, or the lowest finite number, where no column is valid."""
    total_N: Tensor
    target_N: Tensor
    """0 where the label is not among this rank's columns."""
    summed_N: Tensor | None
    """When it was asked for."""
    kept_Nv: Tensor
    """For `Kernels.gradient`."""


class Kernels(NamedTuple):
    """An implementation of both halves."""

    statistics: Callable[[Tensor, Tensor, int, bool], Statistics]
    """``(logits_Nv, label_N, valid, summed)``: ``label_N`` is int64, -1 where the label is another
    rank's; the first ``valid`` columns count; ``summed`` asks for their sum."""
    gradient: Callable[[Tensor, Tensor, int, Tensor | None, Tensor, Tensor, Tensor, float], Tensor]
    """``(kept_Nv, label_N, valid, largest_N, divisor_N, grad_N, own_N, spread)``: return the
    gradient, in the memory of ``kept_Nv`` where that can hold it. All vectors but the labels have
    the dtype of the statistics."""
    keeps_exponentials: bool
    """``kept_Nv`` is exp(x - largest), and the gradient is given None for ``largest_N``."""


def statistics_reference(
    logits_Nv: Tensor, label_N: Tensor, valid: int, summed: bool
) -> Statistics:
    """Return the statistics, and the logits as they are."""
    wide_Nv = logits_Nv.to(accumulate_dtype(logits_Nv.dtype))[:, :valid]
    if not valid:
        nothing_N = wide_Nv.new_zeros(len(label_N))
        largest_N = torch.full_like(nothing_N, -torch.inf)
        zeros_N = nothing_N if summed else None
        return Statistics(largest_N, nothing_N, nothing_N, zeros_N, logits_Nv)
    largest_N = wide_Nv.amax(1)
    total_N = (wide_Nv - largest_N[:, None]).exp().sum(1)
    target_N = wide_Nv.gather(1, label_N.clamp(min=0)[:, None]).squeeze(1)
    target_N = target_N.masked_fill(label_N < 0, 0.0)
    return Statistics(largest_N, total_N, target_N, wide_Nv.sum(1) if summed else None, logits_Nv)


def gradient_reference(
    kept_Nv: Tensor,
    label_N: Tensor,
    valid: int,
    largest_N: Tensor | None,
    divisor_N: Tensor,
    grad_N: Tensor,
    own_N: Tensor,
    spread: float,
) -> Tensor:
    """Return the gradient of logits that `statistics_reference` kept."""
    assert largest_N is not None
    wide_Nv = kept_Nv.to(largest_N.dtype)
    softmax_Nv = (wide_Nv - largest_N[:, None]).exp() / divisor_N[:, None]
    column_1v = torch.arange(kept_Nv.shape[1], device=kept_Nv.device)[None]
    is_target_Nv = column_1v == label_N[:, None]
    dx_Nv = grad_N[:, None] * (softmax_Nv - spread) - own_N[:, None] * is_target_Nv
    return dx_Nv.masked_fill(column_1v >= valid, 0.0).to(kept_Nv.dtype)


def statistics_in_place(
    logits_Nv: Tensor, label_N: Tensor, valid: int, summed: bool, *, keeps_dtype: bool = False
) -> Statistics:
    """Return what `statistics_reference` does; exponentials are kept, each taken once.

    They are in fp32 or better, over the logits where these are of that dtype. With ``keeps_dtype``
    they overwrite the logits in any case, rounded to half where those are half; what is said of a
    token is in fp32 all the same.
    """
    dtype = accumulate_dtype(logits_Nv.dtype)
    shifted_Nv = logits_Nv if keeps_dtype else logits_Nv.to(dtype)
    rows = max(1, SLAB // max(1, logits_Nv.shape[1])) if logits_Nv.is_cpu else len(label_N)
    if rows < len(label_N):
        slabs = zip(shifted_Nv.split(rows), label_N.split(rows), strict=True)
        parts = [_overwrite(slab_rv, label_r, valid, summed, dtype) for slab_rv, label_r in slabs]
        largest_N, total_N, target_N, *sums = (torch.cat(part) for part in zip(*parts, strict=True))
    else:
        largest_N, total_N, target_N, *sums = _overwrite(shifted_Nv, label_N, valid, summed, dtype)
    return Statistics(largest_N, total_N, target_N, sums[0] if sums else None, shifted_Nv)


def _overwrite(
    shifted_Nv: Tensor, label_N: Tensor, valid: int, summed: bool, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Make logits exponentials; return largest, total, target, and the sum if it is asked for."""
    valid_Nv = shifted_Nv[:, :valid]
    if valid:
        largest_N = valid_Nv.amax(1).to(dtype)
    else:
        largest_N = shifted_Nv.new_full((len(label_N),), -torch.inf, dtype=dtype)
    # From all local columns: a rank may hold nothing but padding.
    target_N = shifted_Nv.gather(1, label_N.clamp(min=0).unsqueeze(1)).squeeze(1).to(dtype)
    target_N = target_N.masked_fill(label_N < 0, 0.0)
    sums = (valid_Nv.sum(1, dtype=dtype),) if summed else ()
    # The logits become exp(logit - largest) in place: nobody reads them after this.
    valid_Nv.sub_(largest_N.unsqueeze(1)).exp_()
    return largest_N, valid_Nv.sum(1, dtype=dtype), target_N, *sums


def gradient_in_place(
    kept_Nv: Tensor,
    label_N: Tensor,
    valid: int,
    largest_N: Tensor | None,
    divisor_N: Tensor,
    grad_N: Tensor,
    own_N: Tensor,
    spread: float,
) -> Tensor:
    """Return the gradient from the exponentials that `statistics_in_place` kept, over them."""
    valid_Nv = kept_Nv[:, :valid]
    valid_Nv.mul_((grad_N / divisor_N).unsqueeze(1))
    if spread:
        valid_Nv.sub_((grad_N * spread).unsqueeze(1))
    if valid:
        minus_N1 = -own_N.masked_fill(label_N < 0, 0.0).unsqueeze(1)
        valid_Nv.scatter_add_(1, label_N.clamp(min=0).unsqueeze(1), minus_N1.to(kept_Nv.dtype))
    kept_Nv[:, valid:] = 0.0
    return kept_Nv


REFERENCE = Kernels(statistics_reference, gradient_reference, keeps_exponentials=False)
IN_PLACE = Kernels(statistics_in_place, gradient_in_place, keeps_exponentials=True)
IN_PLACE_HALF = Kernels(
    partial(statistics_in_place, keeps_dtype=True), gradient_in_place, keeps_exponentials=True
)
"""Of half-precision logits, whose memory it keeps to."""
