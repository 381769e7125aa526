"""Which format a checkpoint's folder has, found by the files in it, and its index."""

from pathlib import Path

from megatron.core.dist_checkpointing.format import FORMAT, INDEX, CheckpointError, Index
from megatron.core.dist_checkpointing.format import open_complete as open_ours

TORCH_DIST = "torch_dist"
"""Megatron-LM's format of today (and its torch_dcp): torch.distributed.checkpoint's files."""
TORCH = "torch"
"""Megatron-LM's older format: a file for each tensor- and pipeline-parallel rank."""


def format_of(folder: Path) -> str | None:
    """Return the name of the format of a checkpoint's folder; None if it holds no checkpoint."""
    if (folder / INDEX).exists():
        return FORMAT
    if (folder / ".metadata").exists():
        return TORCH_DIST
    if next(folder.glob("mp_rank_*/*.pt"), None) is not None:
        return TORCH
    return None


def open_index(folder: Path) -> Index:
    """Return the index of a complete checkpoint of any format.

    Raises:
        CheckpointError: it is not whole, a file is absent or has another size, or it is in a format
            that cannot be read.
    """
    found = format_of(folder)
    if found in (FORMAT, None):
        return open_ours(folder)
    raise CheckpointError(
        f"{folder} is in the format {found} (Megatron), which this program cannot read"
    )
