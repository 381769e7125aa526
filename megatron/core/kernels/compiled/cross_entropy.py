"""Both halves of a cross entropy in one pass each; `cross_entropy` says what they compute.

Exponentials overwrite the logits, and the gradient overwrites these.

Shapes: N tokens, v columns on this rank.
"""

import torch
from torch import Tensor

from megatron.core.kernels.compiled.arrays import address, cpu_kernels, threads
from megatron.core.kernels.cross_entropy import Kernels, Statistics


def statistics(logits_Nv: Tensor, label_N: Tensor, valid: int, summed: bool) -> Statistics:
    """Return what `cross_entropy.statistics_reference` does, and keep exp(x - largest)."""
    logits_Nv, label_N = logits_Nv.contiguous(), label_N.contiguous()
    N, v = logits_Nv.shape
    largest_N, total_N, target_N = (logits_Nv.new_empty(N) for _ in range(3))
    summed_N = logits_Nv.new_empty(N) if summed else None
    cpu_kernels.statistics(
        logits_Nv.element_size(),
        address(logits_Nv),
        *(N, v, valid),
        _labels(label_N, v),
        address(largest_N),
        address(total_N),
        address(target_N),
        address(summed_N),
        threads(),
    )
    return Statistics(largest_N, total_N, target_N, summed_N, logits_Nv)


def gradient(
    kept_Nv: Tensor,
    label_N: Tensor,
    valid: int,
    largest_N: Tensor | None,
    divisor_N: Tensor,
    grad_N: Tensor,
    own_N: Tensor,
    spread: float,
) -> Tensor:
    """Return the gradient from the exponentials that `statistics` kept, over them."""
    N, v = kept_Nv.shape
    # Named, so that copies live until they were read.
    divisor_N, label_N = divisor_N.contiguous(), label_N.contiguous()
    grad_N, own_N = grad_N.contiguous(), own_N.contiguous()
    cpu_kernels.cross_entropy_gradient(
        kept_Nv.element_size(),
        address(kept_Nv),
        *(N, v, valid),
        _labels(label_N, v),
        address(divisor_N, like=kept_Nv),
        address(grad_N, like=kept_Nv),
        address(own_N, like=kept_Nv),
        spread,
        threads(),
    )
    return kept_Nv


def _labels(label_N: Tensor, columns: int) -> int:
    """Return the address of labels, each of which the kernels take for a column."""
    assert label_N.dtype == torch.int64
    if label_N.numel() and int(label_N.max()) >= columns:
        raise IndexError(f"label {int(label_N.max())} of {columns} columns")
    return address(label_N)


KERNELS = Kernels(statistics, gradient, keeps_exponentials=True)
