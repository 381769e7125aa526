"""The gradient's norm, and the factor that brings it under a limit.

The norm runs over every logical element of the model once: each rank sums the squares of the
elements it owns (`sharding.Sharding.owned`), and one sum over the world adds them up, so that every
rank clips by the same number. No value is a sentinel: a gradient of zeros has norm 0 and is left
alone, and a norm that is not finite says so.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from megatron.core.kernels.dtypes import accumulate_dtype

# A plain fp32 reduction over 10^7 elements is off by 10^-3; over rows of this length by 10^-9.
_ROW = 4096


def sum_of_squares(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the fp64 sum of squares of all elements of one-dimensional tensors."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for tensor in tensors:
        dtype = accumulate_dtype(tensor.dtype)
        rows = tensor.numel() // _ROW
        if rows:
            norms = torch.linalg.vector_norm(
                tensor[: rows * _ROW].view(rows, _ROW), dim=1, dtype=dtype
            )
            total += norms.double().square_().sum()
        if rows * _ROW < tensor.numel():
            total += torch.linalg.vector_norm(tensor[rows * _ROW :], dtype=dtype).double() ** 2
    return total


def count_zeros(tensors: Iterable[Tensor], numel: int, device: torch.device) -> Tensor:
    """Return how many of ``numel`` elements are zero; ``tensors`` hold them, and gaps of zeros."""
    nonzero = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors:
        nonzero += torch.count_nonzero(tensor)
    return numel - nonzero


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """Return what to multiply a gradient of ``norm`` with so that it is at most ``limit``.

    A limit of 0 clips nothing. The small term keeps a norm of 0 legal, as in torch and Megatron-LM.
    """
    if not limit:
        return torch.ones_like(norm)
    return (limit / (norm + 1e-6)).clamp_(max=1.0)
