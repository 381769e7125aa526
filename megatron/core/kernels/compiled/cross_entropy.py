"""Both halves of a cross entropy in one pass each; `cross_entropy` says what they compute.

Exponentials overwrite the logits, and the gradient overwrites these.

Shapes: N tokens, v columns on this rank.
"""

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from megatron.core.kernels.compiled.arrays import address, cpu_kernels, is_memory, real, threads
from megatron.core.kernels.cross_entropy import (
    Kernels,
    Statistics,
    gradient_in_place,
    statistics_in_place,
)


def statistics(logits_Nv: Tensor, label_N: Tensor, valid: int, summed: bool) -> Statistics:
    """Return what `cross_entropy.statistics_reference` does, and keep exp(x - largest)."""
    if not is_memory(logits_Nv):
        return statistics_in_place(logits_Nv, label_N, valid, summed)
    logits_Nv, label_N = logits_Nv.contiguous(), label_N.contiguous()
    (N, v), dtype = logits_Nv.shape, real(logits_Nv)
    assert 0 <= valid <= v, f"{valid} valid ones of {v} columns"
    if N and int(label_N.max()) >= v:
        raise IndexError(f"label {int(label_N.max())} of {v} columns")
    largest_N, total_N, target_N = (logits_Nv.new_empty(N) for _ in range(3))
    summed_N = logits_Nv.new_empty(N) if summed else None
    cpu_kernels.statistics(
        dtype.itemsize,
        address(logits_Nv, N, v, dtype=dtype),
        *(N, v, valid),
        address(label_N, N, dtype=torch.int64),
        address(largest_N, N, dtype=dtype),
        address(total_N, N, dtype=dtype),
        address(target_N, N, dtype=dtype),
        address(summed_N, N, dtype=dtype),
        threads(),
    )
    increment_version(logits_Nv)  # else autograd would not see that they were overwritten
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
    """Return the gradient from the exponentials that `statistics` kept, over them.

    Labels are those that it was given.
    """
    if not is_memory(kept_Nv):
        rest = (largest_N, divisor_N, grad_N, own_N, spread)
        return gradient_in_place(kept_Nv, label_N, valid, *rest)
    (N, v), dtype = kept_Nv.shape, real(kept_Nv)
    # Named, so that copies live until they were read.
    divisor_N, label_N = divisor_N.contiguous(), label_N.contiguous()
    grad_N, own_N = grad_N.contiguous(), own_N.contiguous()
    cpu_kernels.cross_entropy_gradient(
        dtype.itemsize,
        address(kept_Nv, N, v, dtype=dtype),
        *(N, v, valid),
        address(label_N, N, dtype=torch.int64),
        address(divisor_N, N, dtype=dtype),
        address(grad_N, N, dtype=dtype),
        address(own_N, N, dtype=dtype),
        spread,
        threads(),
    )
    increment_version(kept_Nv)
    return kept_Nv


KERNELS = Kernels(statistics, gradient, keeps_exponentials=True)
