"""How a tensor is handed to the compiled kernels: its address, of rows that lie close together.

`cpu_kernels` is built from csrc/cpu_kernels.cpp by setup.py. `probe.compiled_missing` says whether
it is there, and was built from the sources that go with these callers.
"""

import torch
from torch import Tensor

from megatron.core.kernels.compiled import cpu_kernels

__all__ = ["address", "cpu_kernels", "threads"]


def address(tensor: Tensor | None, like: Tensor | None = None) -> int:
    """Return where a contiguous tensor lies, 0 for None.

    Args:
        tensor: on the CPU.
        like: what it has the dtype of.
    """
    if tensor is None:
        return 0
    assert tensor.is_cpu and tensor.is_contiguous(), f"{tensor.device}, {tensor.stride()}"
    assert like is None or tensor.dtype == like.dtype, f"{tensor.dtype} beside {like.dtype}"
    return tensor.data_ptr()


def threads() -> int:
    """Return how many threads torch uses for one operation."""
    return torch.get_num_threads()
