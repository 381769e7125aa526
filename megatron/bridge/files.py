"""Weights as the transformers library stores them: read a box at a time.

A safetensors file is a header in JSON and the raw bytes of its tensors, row-major: what a
checkpoint of ours is too, so that the same code reads boxes of both. ``pytorch_model.bin`` is
torch's archive, of which nothing but tensors is unpickled, and which stays on disk until it is
read.
"""

import os
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megatron.bridge.safetensors import read_header
from megatron.bridge.settings import read_json
from megatron.core.dist_checkpointing.format import (
    Index,
    dtype_name,
)
from megatron.core.dist_checkpointing.reader import Checkpoint
from megatron.core.dist_checkpointing.stream import Shape
from megatron.core.sharding import Box, box_slices
from megatron.core.utils import UserError

SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"


class Weights(Protocol):
    """Tensors of a folder, open for reading."""

    @property
    def tensors(self) -> Mapping[str, Shape]: ...

    def read(self, name: str, box: Box) -> Tensor:
        """Return a box of a tensor."""
        ...

    def close(self) -> None:
        """Close the files."""
        ...


def open_weights(folder: Path) -> Weights:
    """Return the weights of a folder, from safetensors where there are any.

    Raises:
        UserError: there are none, or a file is not what it should be.
    """
    for name, opened in ((SAFE, _SafeTensors), (PICKLED, _Pickled)):
        if (folder / f"{name}.index.json").exists() or (folder / name).exists():
            return opened(folder)
    raise UserError(
        f"{folder} has none of {SAFE}, {SAFE}.index.json, {PICKLED} and {PICKLED}.index.json"
    )


Listing = Mapping[str, set[str] | None]
"""Files, with the tensors that each must hold (None: whatever it holds)."""


def _listed(listing: Path) -> Listing:
    table = read_json(listing).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
        raise UserError(f"{listing} has no weight_map, which says what stands in which file")
    files: dict[str, set[str]] = {}
    for tensor, file in table.items():
        if Path(file).name != file:
            raise UserError(f"{listing} names a file outside of its folder: {file}")
        files.setdefault(file, set()).add(tensor)
    return files


def _agree(path: Path, listed: set[str] | None, found: set[str]) -> None:
    """Refuse a file that does not hold what its index says."""
    if listed is None or listed == found:
        return
    parts = (("lacks", listed - found), ("has, unlisted,", found - listed))
    said = "; ".join(f"{word} {', '.join(sorted(names))}" for word, names in parts if names)
    raise UserError(f"{path} is not what its index says: it {said}")


def safetensors_index(folder: Path) -> Index:
    """Return the index of a folder's safetensors files, as if they were a checkpoint of ours.

    Raises:
        UserError: there are none, or a file is not what it should be.
    """
    listing = folder / f"{SAFE}.index.json"
    files: Listing = _listed(listing) if listing.exists() else {SAFE: None}
    index = Index(format="safetensors")
    for file, listed in files.items():
        found = read_header(folder / file)
        _agree(folder / file, listed, set(found))
        twice = sorted(found.keys() & index.tensors.keys())
        if twice:
            raise UserError(f"{folder}: several files hold {', '.join(twice)}")
        index.files[file] = os.stat(folder / file).st_size
        index.tensors.update(found)
    return index


class _SafeTensors:
    def __init__(self, folder: Path) -> None:
        index = safetensors_index(folder)
        self.tensors = {
            name: Shape(tensor.dtype, tensor.shape) for name, tensor in index.tensors.items()
        }
        self._checkpoint = Checkpoint(folder, index)

    def read(self, name: str, box: Box) -> Tensor:
        return self._checkpoint.read(name, box)

    def close(self) -> None:
        self._checkpoint.close()


class _Pickled:
    def __init__(self, folder: Path) -> None:
        listing = folder / f"{PICKLED}.index.json"
        files: Listing = _listed(listing) if listing.exists() else {PICKLED: None}
        self._tensors: dict[str, Tensor] = {}
        for file, listed in files.items():
            found = _load(folder / file)
            _agree(folder / file, listed, set(found))
            self._tensors.update(found)
        self.tensors = {
            name: Shape(dtype_name(tensor.dtype), tuple(tensor.shape))
            for name, tensor in self._tensors.items()
        }

    def read(self, name: str, box: Box) -> Tensor:
        return self._tensors[name][box_slices(box)].contiguous()

    def close(self) -> None:
        self._tensors.clear()


def _load(path: Path) -> dict[str, Tensor]:
    """Return the tensors of one of torch's archives; they stay on disk but in its oldest format.

    Raises:
        UserError: it is absent, damaged, or holds more than tensors.
    """
    try:
        mapped = zipfile.is_zipfile(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except pickle.UnpicklingError:  # torch's words say how to read it unsafely
        raise UserError(
            f"{path} is no file of tensors that can be read safely: it is damaged, or names "
            "something else than tensors"
        ) from None
    except (OSError, RuntimeError, ValueError, EOFError) as error:
        first = str(error).strip().split("\n")[0]
        raise UserError(f"{path} is no file of tensors that can be read safely: {first}") from None
    if not isinstance(loaded, dict) or not all(isinstance(x, Tensor) for x in loaded.values()):
        raise UserError(f"{path} holds something else than tensors by name")
    return {str(name): tensor.detach() for name, tensor in loaded.items()}
