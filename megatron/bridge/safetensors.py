"""The header of a safetensors file: names, dtypes, shapes and places, in JSON before raw bytes."""

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.boxes import whole_box
from megatron.core.dist_checkpointing.format import StoredBox, StoredTensor
from megatron.core.dist_checkpointing.stream import Shape
from megatron.core.utils import UserError

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


def read_header(path: Path) -> dict[str, StoredTensor]:
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
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise UserError(f"{path} is no whole safetensors file: {error}") from None
    end = base
    for start, size, name in sorted(
        (tensor.boxes[0].offset, tensor.bytes_of(tensor.boxes[0]), name)
        for name, tensor in found.items()
    ):
        if start != end:
            raise UserError(
                f"{path} is damaged: {name} begins at byte {start - base} of the tensors, and not "
                f"at {end - base}, where the one before ends"
            )
        end = start + size
    if end - base != data:
        raise UserError(f"{path} is damaged: its tensors have {end - base} bytes, the file {data}")
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


def header_of(tensors: Mapping[str, Shape]) -> bytes:
    """Return what stands in a file before the bytes of ``tensors``, which follow in this order."""
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
    return struct.pack("<Q", len(text)) + text
