"""Products of groups of rows, each with a matrix of its own: the linear layers of experts.

    product       y[rows of e] = x[rows of e] @ matrices[e]
    accumulate    total[e]    += grad[rows of e].T @ x[rows of e]

Rows lie group after group; a group may be empty. The reference multiplies one group after the other
and takes every dtype. ``torch`` is one call of `torch.nn.functional.grouped_mm`, which has no fp64,
and whose rows lie a multiple of 16 bytes apart: widths are multiples of `WIDTHS`.

Shapes: N rows, E groups, I inner features, O output features.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.kernels import matmul

WIDTHS = 8
"""What widths of torch's grouped product in bf16 are a multiple of."""


class GroupedProducts(Protocol):
    """One implementation of both operations."""

    def product(self, x_NI: Tensor, matrices_EIO: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return each row times the matrix of its group, ``[N, O]``, in their dtype."""
        ...

    def accumulate(
        self, total_EOI: Tensor, grad_NO: Tensor, x_NI: Tensor, sizes: Sequence[int]
    ) -> None:
        """Add each group's grad.T @ x to ``total_EOI``, in its dtype."""
        ...


def parts(sizes: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Yield number and rows of each group that is not empty."""
    start = 0
    for number, size in enumerate(sizes):
        if size:
            yield number, slice(start, start + size)
        start += size


class Loop:
    """The reference: one product after the other."""

    def product(self, x_NI: Tensor, matrices_EIO: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return each row times the matrix of its group."""
        y_NO = x_NI.new_empty(x_NI.shape[0], matrices_EIO.shape[2])
        for number, rows in parts(sizes):
            if matmul.upcast_pays(x_NI.device, x_NI.dtype):
                y_NO[rows] = matmul.matmul(x_NI[rows], matrices_EIO[number])
            else:
                torch.mm(x_NI[rows], matrices_EIO[number], out=y_NO[rows])
        return y_NO

    def accumulate(
        self, total_EOI: Tensor, grad_NO: Tensor, x_NI: Tensor, sizes: Sequence[int]
    ) -> None:
        """Add each group's grad.T @ x."""
        for number, rows in parts(sizes):
            matmul.accumulate_wgrad(total_EOI[number], grad_NO[rows], x_NI[rows])


class Torch(Loop):
    """One call for all groups, of torch's."""

    def product(self, x_NI: Tensor, matrices_EIO: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return each row times the matrix of its group."""
        return F.grouped_mm(x_NI, matrices_EIO, offs=_ends(sizes, x_NI.device))

    def accumulate(
        self, total_EOI: Tensor, grad_NO: Tensor, x_NI: Tensor, sizes: Sequence[int]
    ) -> None:
        """Add each group's grad.T @ x, which is rounded to the dtype of ``x`` before."""
        if total_EOI.dtype != x_NI.dtype:
            # The sum over microbatches must not be rounded to half at each of them.
            super().accumulate(total_EOI, grad_NO, x_NI, sizes)
            return
        total_EOI.add_(F.grouped_mm(grad_NO.t(), x_NI, offs=_ends(sizes, x_NI.device)))


LOOP, TORCH = Loop(), Torch()


def torch_missing(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why torch's grouped product does not work here, or None."""
    if not hasattr(F, "grouped_mm"):
        return f"this torch ({torch.__version__}) has no torch.nn.functional.grouped_mm"
    if device.type != "cuda":
        return "a loop is as fast on the CPU"
    if dtype != torch.bfloat16:
        return f"on CUDA it is for bf16, not {str(dtype).removeprefix('torch.')}"
    if not torch.cuda.is_available():
        return "there is no CUDA device here"
    if torch.cuda.get_device_capability(device) < (9, 0):
        return "it needs a device of compute capability 9.0"
    return None


def _ends(sizes: Sequence[int], device: torch.device) -> Tensor:
    ends_E = torch.tensor(sizes).cumsum(0).to(torch.int32)
    return ends_E.to(device, non_blocking=True)  # else the host waits for all that is under way
