"""Cross entropy over a vocabulary that is cut over the tensor-parallel axis.

Each rank sees its share of the logits. The largest logit, the sum of exponentials and the target's
logit are reduced over the axis; three numbers per token travel, never the logits. What a rank does
with its own share is a pair of kernels (`core.kernels.cross_entropy`). Rows that only pad the
vocabulary are left out of the sum and get no gradient. One matrix of the logits' size is alive.

With label smoothing e, the loss is ``(1 - e) * -log p(target) + e * mean over the vocabulary of
-log p``.

Shapes: S positions, B batch, N = S * B tokens, v this rank's share of the padded vocabulary; 3 is
itself.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.core import comm
from megatron.core.kernels.cross_entropy import IN_PLACE, Kernels
from megatron.core.mesh import Axis
from megatron.core.tensor_parallel.embedding import VocabularyRows


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_Nv: Tensor,
        labels_N: Tensor,
        rows: VocabularyRows,
        axis: Axis,
        smoothing: float,
        kernels: Kernels,
    ) -> Tensor:
        label_N = labels_N
        if axis.size > 1:
            label_N = labels_N - rows.start
            label_N = label_N.masked_fill((label_N < 0) | (label_N >= rows.valid), -1)
        own = kernels.statistics(logits_Nv, label_N, rows.valid, smoothing != 0)
        # Relative to the largest logit of all ranks.
        largest_N, total_N = own.largest_N, own.total_N
        lowered_N = None
        if axis.size > 1:
            largest_N = largest_N.clone()
            comm.all_reduce(largest_N, axis, "max")
            lowered_N = (own.largest_N - largest_N).exp()
            total_N = total_N * lowered_N
        target_N = (own.target_N - largest_N).masked_fill(label_N < 0, 0.0)
        rest_N = target_N if own.summed_N is None else own.summed_N - largest_N * rows.valid
        sums_3N = torch.stack([target_N, total_N, rest_N])
        comm.all_reduce(sums_3N, axis)
        target_N, total_N, all_logits_N = sums_3N
        log_total_N = total_N.log()
        loss_N: Tensor = log_total_N - target_N
        if smoothing:
            mean_N = log_total_N - all_logits_N / rows.vocab_size
            loss_N = (1 - smoothing) * loss_N + smoothing * mean_N
        # Infinite where this rank's logits are too low to count. Never a view, with which the other
        # two sums would be kept.
        divisor_N = total_N.clone() if lowered_N is None else total_N / lowered_N
        kept_largest_N = None if kernels.keeps_exponentials else own.largest_N
        ctx.save_for_backward(own.kept_Nv, divisor_N, label_N, kept_largest_N)
        ctx.rows, ctx.smoothing, ctx.kernels, ctx.dtype = rows, smoothing, kernels, logits_Nv.dtype
        return loss_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kept_Nv, divisor_N, label_N, largest_N = ctx.saved_tensors
        grad_N = grads[0].to(divisor_N.dtype).contiguous()
        # In the storage of what is kept, where it fits: a second backward through it is a bug.
        # Without its history: this becomes the gradient, which a postponed closure may hold on to.
        dlogits_Nv = ctx.kernels.gradient(
            kept_Nv.detach(),
            label_N,
            ctx.rows.valid,
            largest_N,
            divisor_N,
            grad_N,
            (1 - ctx.smoothing) * grad_N,
            ctx.smoothing / ctx.rows.vocab_size,
        )
        return dlogits_Nv.to(ctx.dtype), None, None, None, None, None


def cross_entropy(
    logits_SBv: Tensor,
    labels_SB: Tensor,
    rows: VocabularyRows,
    axis: Axis,
    label_smoothing: float = 0.0,
    kernels: Kernels | Callable[..., Tensor] = IN_PLACE,
) -> Tensor:
    """Return the loss of every token, in fp32 or better; overwrites ``logits_SBv``.

    Args:
        logits_SBv: this rank's share of the logits; owned by the caller, who reads them no more.
        labels_SB: token ids below the true vocabulary size.
        rows: which rows this rank holds.
        axis: the tensor-parallel axis.
        label_smoothing: share of the target spread over the vocabulary.
        kernels: what is done with this rank's share; or a function of logits, labels and a process
            group that also reduces over ranks, without smoothing, as Transformer Engine's.
    """
    if not isinstance(kernels, Kernels):
        assert not label_smoothing, label_smoothing
        if rows.valid < logits_SBv.shape[-1]:
            logits_SBv[..., rows.valid :] = -torch.inf  # it knows no padding
        return kernels(logits_SBv, labels_SB, axis.group)
    loss_N: Tensor = _CrossEntropy.apply(
        logits_SBv.flatten(0, -2),
        # A transposed batch of labels is no vector yet.
        labels_SB.flatten(),
        rows,
        axis,
        label_smoothing,
        kernels,
    )
    return loss_N.view(labels_SB.shape)
