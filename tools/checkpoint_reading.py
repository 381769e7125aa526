"""What `checkpoint.py` reads: checkpoints are opened and described (a part of that tool)."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.bridge import files
from megatron.bridge.settings import read_json
from megatron.core.dist_checkpointing import catalog
from megatron.core.dist_checkpointing.boxes import volume, whole_box
from megatron.core.dist_checkpointing.detect import format_of
from megatron.core.dist_checkpointing.format import StoredTensor
from megatron.core.dist_checkpointing.reader import Checkpoint
from megatron.core.utils import UserError
from megatron.training.checkpoints import source as sources
from megatron.training.checkpoints.contents import OPTIMIZER, RANDOM, WEIGHTS
from megatron.training.recovery_config import SUBFOLDER


def say(line: str) -> None:
    """Print a line beside the results."""
    print(line, file=sys.stderr)


def open_checkpoint(folder: str, step: int | None) -> Checkpoint:
    """Return an open checkpoint of any format: the folder's, or the newest complete one in it.

    Raises:
        UserError: there is none.
    """
    root = Path(folder)
    if not root.exists():
        raise UserError(f"{folder} does not exist")
    if format_of(root) is not None:
        return Checkpoint(root)
    if is_hub_folder(root):
        return _open_hub_folder(root)
    found = sources.find(folder, step, say)
    if found is None:
        raise UserError(f"{folder} holds no checkpoint")
    return Checkpoint(found.folder, found.index)


def is_hub_folder(folder: Path) -> bool:
    """Return whether a folder is one of the transformers library's."""
    return (folder / "config.json").exists() and format_of(folder) is None


def _open_hub_folder(folder: Path) -> Checkpoint:
    index = files.safetensors_index(folder)
    index.facts["config"] = read_json(folder / "config.json")
    return Checkpoint(folder, index)


def has_checksums(source: Checkpoint) -> bool:
    """Return whether there is anything to compare the bytes with."""
    stored = source.tensors.values()
    return bool(source.index.blocks) or all(
        box.crc32 is not None for tensor in stored for box in tensor.boxes
    )


def claimed(
    folder: str, step: int | None, *, everything: bool
) -> tuple[list[Checkpoint], list[str]]:
    """Return the checkpoints to verify, and what is wrong with those that cannot be opened.

    Raises:
        UserError: there is nothing that claims to be one.
    """
    root = Path(folder)
    if not root.exists():
        raise UserError(f"{folder} does not exist")
    if format_of(root) is not None or is_hub_folder(root):
        return _opened([root])
    if step is not None:
        path = root / catalog.folder_name(step)
        if not path.exists():
            raise UserError(f"--ckpt-step ({step}): {path} does not exist")
        return _opened([path])
    held = catalog.scan(root)
    recovery = catalog.scan(root / SUBFOLDER)
    if held.is_empty and recovery.is_empty:
        raise UserError(f"{folder} holds no checkpoint")
    ignored = {**held.ignored, **recovery.ignored}
    damages = [f"{path}: {reason}" for path, reason in ignored.items()]
    newest, last = catalog.newest(held), catalog.newest(recovery)
    if last is not None and (newest is None or catalog.is_later(held, newest, last)):
        newest = last
    chosen = [newest] if newest is not None else []
    if everything:
        chosen = [*held.complete, *recovery.complete]
    opened, further = _opened([found.folder for found in chosen])
    return opened, damages + further


def _opened(folders: Sequence[Path]) -> tuple[list[Checkpoint], list[str]]:
    opened, damages = [], []
    for folder in folders:
        try:
            hub = format_of(folder) is None and is_hub_folder(folder)
            opened.append(_open_hub_folder(folder) if hub else Checkpoint(folder))
        except UserError as error:
            damages.append(str(error))
    return opened, damages


def part_name(key: str) -> str:
    """Return which part of a checkpoint a tensor belongs to."""
    if key.startswith(WEIGHTS):
        return "weights"
    if key.startswith(RANDOM):
        return "random states"
    if key.startswith(OPTIMIZER):
        return "optimizer " + key.removeprefix(OPTIMIZER).partition(".")[0]
    return "other"


def tensor_bytes(tensor: StoredTensor) -> int:
    """Return the bytes of all elements of a tensor."""
    return volume(whole_box(tensor.shape)) * tensor.torch_dtype.itemsize


def described(source: Checkpoint) -> dict[str, Any]:
    """Return all that a checkpoint says of itself, as JSON has it."""
    tensors, parts = {}, dict[str, dict[str, int]]()
    for key, tensor in sorted(source.tensors.items()):
        elements, size = volume(whole_box(tensor.shape)), tensor_bytes(tensor)
        tensors[key] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "bytes": size,
            "boxes": len(tensor.boxes),
        }
        part = parts.setdefault(part_name(key), {"tensors": 0, "elements": 0, "bytes": 0})
        part["tensors"] += 1
        part["elements"] += elements
        part["bytes"] += size
    return {
        "folder": str(source.folder),
        "format": source.format,
        "hash": source.hash,
        "files": len(source.files),
        "bytes": sum(source.files.values()),
        "facts": source.facts,
        "parts": parts,
        "tensors": tensors,
    }
