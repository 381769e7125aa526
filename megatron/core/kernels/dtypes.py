"""The dtype that sums are taken in."""

import torch


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums of ``dtype`` values are taken: at least fp32."""
    return torch.promote_types(dtype, torch.float32)
