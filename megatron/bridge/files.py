"""Weights as the transformers library stores them: read a box at a time, written a slab at a time.

A safetensors file is a header in JSON and the raw bytes of its tensors, row-major: what a
checkpoint of ours is too, so that the same code reads boxes of both. ``pytorch_model.bin`` is
torch's archive, of which nothing but tensors is unpickled, and which stays on disk until it is
read.
"""

import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.bridge.settings import read_json
from megatron.core.dist_checkpointing.boxes import slabs, whole_box
from megatron.core.dist_checkpointing.format import (
    CHUNK,
    DTYPES,
    Index,
    StoredBox,
    StoredTensor,
    dtype_name,
)
from megatron.core.dist_checkpointing.part import write_all
from megatron.core.dist_checkpointing.publishing import building, put_in_place
from megatron.core.dist_checkpointing.reader import Checkpoint
from megatron.core.dist_checkpointing.save import check_space
from megatron.core.dist_checkpointing.stream import ReadSlab, Shape, as_bytes
from megatron.core.sharding import Box, box_slices
from megatron.core.utils import UserError

SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"
LONGEST_HEADER = 100 * 2**20
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
_NAMES = {ours: theirs for theirs, ours in _DTYPES.items()}


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
        found = _read_header(folder / file)
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


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """Return what a safetensors file holds.

    Raises:
        UserError: it is absent, cut off, or no such file.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 8:
                raise ValueError(f"it has {size} bytes")
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size - 8, LONGEST_HEADER):
                raise ValueError(f"its header would have {length} bytes, the file has {size}")
            entries = json.loads(file.read(length))
        base, data = 8 + length, size - 8 - length
        found = {
            name: _entry(name, entry, path.name, base, data)
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is no whole safetensors file: {error}") from None
    held = sum(tensor.bytes_of(tensor.boxes[0]) for tensor in found.values())
    if held != data:
        raise UserError(f"{path} is damaged: its tensors have {held} bytes, the file {data}")
    return found


def _entry(name: str, entry: Mapping[str, Any], file: str, base: int, data: int) -> StoredTensor:
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"{name} has dtype {entry['dtype']}, which cannot be read here")
    shape = tuple(int(size) for size in entry["shape"])
    start, stop = (int(offset) for offset in entry["data_offsets"])
    box = StoredBox(whole_box(shape), file, base + start, None)
    tensor = StoredTensor(_DTYPES[entry["dtype"]], shape, [box])
    if start < 0 or stop > data or stop - start != tensor.bytes_of(box):
        raise ValueError(f"{name} would lie from byte {start} to {stop} of {data}")
    return tensor


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


def write_weights(
    folder: Path,
    tensors: Mapping[str, Shape],
    read: ReadSlab,
    settings: Mapping[str, Any],
    *,
    most_bytes: int,
    told: Callable[[str, int], None] = lambda name, size: None,
) -> list[str]:
    """Write a folder with config.json and safetensors, whole or not at all; return its files.

    Args:
        folder: which must not be there yet.
        tensors: what to write, in order.
        read: gives the values; its results have the dtype that ``tensors`` says.
        settings: contents of config.json.
        most_bytes: size above which a further file is begun; a tensor is never cut.
        told: hears of each slab that is written.

    Raises:
        UserError: there is no room.
        OSError: the file system failed. In both cases nothing is left behind.
    """
    with building(folder) as partial:
        total = sum(tensor.bytes for tensor in tensors.values())
        check_space(partial, total)
        shards = _shards(tensors, most_bytes)
        names = [SAFE]
        if len(shards) > 1:
            count = len(shards)
            names = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
            table = {key: name for name, keys in zip(names, shards, strict=True) for key in keys}
            listing = {"metadata": {"total_size": total}, "weight_map": table}
            _write_json(partial / f"{SAFE}.index.json", listing)
        for name, keys in zip(names, shards, strict=True):
            _write_shard(partial / name, {key: tensors[key] for key in keys}, read, told)
        _write_json(partial / "config.json", settings)
        put_in_place(partial, folder)
    return names


def _shards(tensors: Mapping[str, Shape], most_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.bytes > most_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.bytes
    return shards


def _write_shard(
    path: Path, tensors: Mapping[str, Shape], read: ReadSlab, told: Callable[[str, int], None]
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.bytes],
        }
        offset += tensor.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb", buffering=0) as file:
        write_all(file.fileno(), memoryview(struct.pack("<Q", len(text)) + text))
        for name, tensor in tensors.items():
            for slab in slabs(whole_box(tensor.shape), tensor.itemsize, CHUNK):
                values = read(name, slab)
                assert values.dtype == DTYPES[tensor.dtype], f"{name}: {values.dtype}"
                data = as_bytes(values)
                write_all(file.fileno(), data)
                told(name, len(data))
        os.fsync(file.fileno())


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
