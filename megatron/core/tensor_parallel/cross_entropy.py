"""Cross entropy over a vocabulary that is cut over the tensor-parallel axis.

Each rank sees its share of the logits. The largest logit, the sum of exponentials and the
target's logit are reduced over the axis; three numbers per token travel, never the logits. Rows
that only pad the vocabulary are left out of the sum and get no gradient. The softmax overwrites
the logits, so that one matrix of that size is alive (Shoeybi et al., 2019, section 3): in fp32 a
copy of half-precision logits, or with ``keeps_dtype`` the logits themselves. Then exponentials are
rounded to half; what is said of a token (largest logit, sums, loss) is in fp32 all the same.

With label smoothing e, the loss is ``(1 - e) * -log p(target) + e * mean over the vocabulary of
-log p``.

Shapes: S positions, B batch, N = S * B tokens, v this rank's share of the padded vocabulary; 1 and
3 are themselves.
"""

from typing import Any

import torch
from torch import Tensor

from megatron.core import comm
from megatron.core.kernels.dtypes import accumulate_dtype
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
        keeps_dtype: bool,
    ) -> Tensor:
        dtype = accumulate_dtype(logits_Nv.dtype)
        shifted_Nv = logits_Nv if keeps_dtype else logits_Nv.to(dtype)
        valid_Nv = shifted_Nv[:, : rows.valid]
        if rows.valid:
            largest_N = valid_Nv.amax(1).to(dtype)
        else:
            largest_N = shifted_Nv.new_full((len(labels_N),), -torch.inf, dtype=dtype)
        comm.all_reduce(largest_N, axis, "max")
        if axis.size == 1:
            target_N1 = labels_N.unsqueeze(1)
            here_N1 = None
        else:
            local_N = labels_N - rows.start
            here_N1 = ((local_N >= 0) & (local_N < rows.valid)).unsqueeze(1)
            target_N1 = local_N.unsqueeze(1).masked_fill(~here_N1, 0)
        # From all local rows: a rank may hold nothing but padding.
        target_logit_N = shifted_Nv.gather(1, target_N1).squeeze(1).to(dtype) - largest_N
        if here_N1 is not None:
            target_logit_N = target_logit_N.masked_fill(~here_N1.squeeze(1), 0.0)
        sums_3N = torch.stack([target_logit_N, target_logit_N, target_logit_N])
        if smoothing:
            sums_3N[2] = valid_Nv.sum(1, dtype=dtype) - largest_N * rows.valid
        # The logits become exp(logit - largest) in place: nobody reads them after this.
        valid_Nv.sub_(largest_N.unsqueeze(1)).exp_()
        sums_3N[1] = valid_Nv.sum(1, dtype=dtype)
        comm.all_reduce(sums_3N, axis)
        target_logit_N, total_N, all_logits_N = sums_3N
        log_total_N = total_N.log()
        loss_N: Tensor = log_total_N - target_logit_N
        if smoothing:
            mean_N = log_total_N - all_logits_N / rows.vocab_size
            loss_N = (1 - smoothing) * loss_N + smoothing * mean_N
        ctx.save_for_backward(shifted_Nv, total_N, target_N1)
        ctx.here_N1, ctx.rows, ctx.smoothing, ctx.dtype = here_N1, rows, smoothing, logits_Nv.dtype
        return loss_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Without its history: this becomes the gradient, which a postponed closure may hold on to.
        exp_Nv, total_N, target_N1 = (saved.detach() for saved in ctx.saved_tensors)
        rows, smoothing, grad_N = ctx.rows, ctx.smoothing, grads[0].to(total_N.dtype)
        valid_Nv = exp_Nv[:, : rows.valid]
        # grad * softmax, in the same storage; a second backward through it is a bug.
        valid_Nv.mul_((grad_N / total_N).unsqueeze(1))
        if smoothing:
            valid_Nv.sub_((grad_N * (smoothing / rows.vocab_size)).unsqueeze(1))
        minus_N1 = -(1 - smoothing) * grad_N.unsqueeze(1)
        if ctx.here_N1 is not None:
            minus_N1 = minus_N1.masked_fill(~ctx.here_N1, 0.0)
        if rows.valid:
            valid_Nv.scatter_add_(1, target_N1, minus_N1.to(exp_Nv.dtype))
        exp_Nv[:, rows.valid :] = 0.0
        return exp_Nv.to(ctx.dtype), None, None, None, None, None


def cross_entropy(
    logits_SBv: Tensor,
    labels_SB: Tensor,
    rows: VocabularyRows,
    axis: Axis,
    label_smoothing: float = 0.0,
    keeps_dtype: bool = False,
) -> Tensor:
    """Return the loss of every token, in fp32 or better; overwrites ``logits_SBv``.

    Args:
        logits_SBv: this rank's share of the logits; owned by the caller, who reads them no more.
        labels_SB: token ids below the true vocabulary size.
        rows: which rows this rank holds.
        axis: the tensor-parallel axis.
        label_smoothing: share of the target spread over the vocabulary.
        keeps_dtype: keep the exponentials in the dtype of the logits, also where that is half.
    """
    loss_N: Tensor = _CrossEntropy.apply(
        logits_SBv.flatten(0, -2), labels_SB.flatten(), rows, axis, label_smoothing, keeps_dtype
    )
    return loss_N.view(labels_SB.shape)
