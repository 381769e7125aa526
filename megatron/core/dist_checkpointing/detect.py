"""Which format a checkpoint's folder has, found by the files in it, and its index.

Nobody has to name a format: what is there decides (Megatron-LM's ``--auto-detect-ckpt-format``).
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from megatron.core.dist_checkpointing.format import FORMAT, INDEX, CheckpointError, Index
from megatron.core.dist_checkpointing.format import open_complete as open_ours
from megatron.core.dist_checkpointing.megatron_formats import legacy, torch_dist
from megatron.core.dist_checkpointing.megatron_formats.dcp import METADATA

_FOREIGN: Mapping[str, Callable[[Path], Index]] = {
    torch_dist.NAME: torch_dist.read_index,
    legacy.NAME: legacy.read_index,
}


def format_of(folder: Path) -> str | None:
    """Return the name of the format of a checkpoint's folder; None if it holds no checkpoint.

    Raises:
        CheckpointError: nobody may look into it.
    """
    try:
        if (folder / INDEX).exists():
            return FORMAT
        if (folder / METADATA).exists():
            return torch_dist.NAME
        return legacy.NAME if legacy.files(folder) else None
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from None


def mark_of(folder: Path, kind: str) -> Path:
    """Return the file of a checkpoint that its program wrote last (or one of the last)."""
    if kind == legacy.NAME:
        return max(legacy.files(folder).values(), key=os.path.getmtime)
    return folder / (METADATA if kind == torch_dist.NAME else INDEX)


def open_index(folder: Path) -> Index:
    """Return the index of a complete checkpoint of any format.

    Raises:
        CheckpointError: it is not whole, or a file is absent or has another size.
    """
    kind = format_of(folder)
    if kind is None:
        _refuse_others(folder)
    read = _FOREIGN.get(kind or FORMAT)
    if read is None:
        return open_ours(folder)
    try:
        return read(folder)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from None
    except Exception as error:
        # Pickles and archives have too many ways to be wrong to test for each of them.
        raise CheckpointError(
            f"{folder} is damaged, or unlike what {kind} is: {error!r}"
        ) from error


def _refuse_others(folder: Path) -> None:
    """Say what a folder is that is nearly a checkpoint, or one that cannot be read."""
    if any(folder.glob("*.distcp")):
        raise CheckpointError(f"{folder} has no {METADATA}: the save of it never finished")
    if any(folder.glob("*/.zarray")):
        raise CheckpointError(
            f"{folder} is in the format zarr, which Megatron-core gave up; load it with a "
            "Megatron-core that still reads it and save it as torch_dist"
        )
    if any(folder.glob("mp_rank_*_*_*/*.pt")):
        raise CheckpointError(f"{folder}: experts in the format {legacy.NAME} cannot be read")
