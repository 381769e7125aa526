"""How a tensor is handed to the compiled kernels: its address, of rows that lie close together.

`cpu_kernels` is built from csrc/cpu_kernels.cpp by setup.py. `probe.compiled_missing` says whether
it is there, and was built from the sources that go with these callers.
"""

import torch
from torch import Tensor

from megatron.core.kernels.compiled import cpu_kernels
from megatron.core.kernels.probe import COMPILED_DTYPES

__all__ = ["address", "cpu_kernels", "is_memory", "real", "start", "threads"]


def address(tensor: Tensor | None, *shape: int, dtype: torch.dtype) -> int:
    """Return where a contiguous tensor lies, 0 for None: C++ reads what it is told to.

    Args:
        tensor: on the CPU.
        shape: what its shape must be, its leading dims taken as one.
        dtype: what its dtype must be.
    """
    if tensor is None:
        return 0
    kept = len(shape) - 1
    found = (tensor.shape[: tensor.dim() - kept].numel(), *tensor.shape[tensor.dim() - kept :])
    assert found == shape and tensor.dtype == dtype, (
        f"{tensor.shape} {tensor.dtype}: {shape} {dtype}"
    )
    assert tensor.is_cpu and tensor.is_contiguous(), f"{tensor.device}, {tensor.stride()}"
    return start(tensor)


def start(tensor: Tensor) -> int:
    """Return where a tensor's first number lies."""
    assert is_memory(tensor) and not tensor.is_neg(), f"{type(tensor)} has no numbers as they are"
    found = tensor.data_ptr()
    assert found or not tensor.numel(), "zeros that nobody wrote down"
    return found


def is_memory(tensor: Tensor) -> bool:
    """Return whether there are numbers behind it: torch's FakeTensor, say, has but a shape."""
    return type(tensor) in (Tensor, torch.nn.Parameter)


def real(tensor: Tensor) -> torch.dtype:
    """Return a dtype that the kernels count in."""
    assert tensor.dtype in COMPILED_DTYPES, f"the kernels do not count in {tensor.dtype}"
    return tensor.dtype


def threads() -> int:
    """Return how many threads torch uses for one operation."""
    return torch.get_num_threads()
