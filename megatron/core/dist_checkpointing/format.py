"""The files of a checkpoint: raw bytes of boxes, and one JSON file that says where each lies.

    iter_0000010/
        rank00000.bin ...   boxes one after the other, row-major, little-endian, aligned to 64 bytes
        checkpoint.json     format and version, facts of the run, files with sizes, and for each
                            logical tensor its dtype, shape and boxes (file, offset, crc32, extent)

``checkpoint.json`` is written last, and closes with a checksum of itself. Its ``hash`` names the
content: names, shapes, dtypes and checksums of the tensors, and nothing of where or when they were
written, so that equal states have equal hashes (on layouts that cut them into the same boxes).
Nothing here is ever unpickled.

Why not ``torch.distributed.checkpoint``: its planner can carry these boxes, but its metadata is a
pickle, its storage keeps each tensor as a ``torch.save`` archive, and its saves gather plans over
a process group, from a background thread when asynchronous. With own metadata, own storage and own
planners nothing of it would be left but that gather, which is not needed: a rank's part of the
index does not depend on the other ranks, and rank 0 joins the parts when it publishes.
"""

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.core.dist_checkpointing.boxes import volume
from megatron.core.sharding import Box
from megatron.core.utils import UserError, atomic_path

INDEX = "checkpoint.json"
FORMAT = "megatron-boxes"
VERSION = 1
ALIGNMENT = 64
CHUNK = 16 * 2**20
"""Bytes that one read, write or staging buffer moves at a time."""
BLOCK = 2**20
"""Bytes of a chunk that are moved and checked at once, while a processor's cache still has them."""

DTYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "float64 float32 bfloat16 float16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 "
        "bool"
    ).split()
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class CheckpointError(UserError):
    """A checkpoint that cannot be used, and why."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as metadata holds it."""
    assert dtype in _NAMES, f"{dtype} cannot be stored"
    return _NAMES[dtype]


class StoredBox(NamedTuple):
    """Where one box of a logical tensor lies."""

    box: Box
    file: str
    offset: int
    crc32: int | None
    """None: only a `Block` around it has one."""


class Block(NamedTuple):
    """Bytes of another program's file that have a checksum."""

    key: str
    """Of the tensor there, in that program's words."""
    file: str
    offset: int
    length: int
    crc32: int


@dataclass
class StoredTensor:
    """A logical tensor as the files hold it."""

    dtype: str
    shape: tuple[int, ...]
    boxes: list[StoredBox] = field(default_factory=list)
    padded_to: int = 1
    """Other programs store rows that only pad a vocabulary, up to a multiple of this number."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return the dtype as torch's."""
        return DTYPES[self.dtype]

    def bytes_of(self, box: StoredBox) -> int:
        """Return the size of one box in its file."""
        return volume(box.box) * self.torch_dtype.itemsize


@dataclass
class Index:
    """What ``checkpoint.json`` says; also a rank's part of it."""

    facts: dict[str, Any] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    """Size in bytes by file name."""
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    format: str = FORMAT
    """Name of the format; another program's has no ``checkpoint.json``."""
    blocks: list[Block] = field(default_factory=list)
    """Checksums in another program's files."""

    @property
    def bytes(self) -> int:
        """Return the size of all data files."""
        return sum(self.files.values())

    @property
    def hash(self) -> str:
        """Return the hash of the content; equal for equal tensors in equal boxes."""
        lines = []
        for key in sorted(self.tensors):
            tensor = self.tensors[key]
            boxes = sorted((box.box, box.crc32 or 0) for box in tensor.boxes)
            lines.append(_json([key, tensor.dtype, tensor.shape, boxes]))
        checksums = sorted((block.key, block.crc32) for block in self.blocks)
        lines += [f"{key} {crc}" for key, crc in checksums]
        return _digest("\n".join(lines))

    def text(self) -> str:
        """Return the JSON text, one tensor to a line, its own checksum as last entry."""
        tensors = {key: _pack(self.tensors[key]) for key in sorted(self.tensors)}
        head = {
            "format": FORMAT,
            "version": VERSION,
            "byteorder": sys.byteorder,
            "hash": self.hash,
        }
        body = f"{_json(head)[:-1]},\n"
        body += f'"facts": {json.dumps(self.facts, indent=1)},\n'
        body += f'"files": {_json(self.files)},\n"tensors": {{\n'
        body += ",\n".join(f"{_json(key)}: {_json(value)}" for key, value in tensors.items())
        body += '\n},\n"checksum": '
        return f'{body}"{_digest(body)}"}}\n'


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _digest(body: str) -> str:
    return hashlib.blake2b(body.encode(), digest_size=8).hexdigest()


def _pack(tensor: StoredTensor) -> dict[str, Any]:
    boxes = [
        [box.file, box.offset, box.crc32, [list(extent) for extent in box.box]]
        for box in tensor.boxes
    ]
    return {"dtype": tensor.dtype, "shape": list(tensor.shape), "boxes": boxes}


def _unpack(value: Mapping[str, Any]) -> StoredTensor:
    boxes = [
        StoredBox(tuple((int(a), int(b)) for a, b in extents), str(file), int(offset), int(crc))
        for file, offset, crc, extents in value["boxes"]
    ]
    if value["dtype"] not in DTYPES:
        raise ValueError(f"dtype {value['dtype']!r} is unknown")
    return StoredTensor(value["dtype"], tuple(int(size) for size in value["shape"]), boxes)


def write_index(index: Index, path: Path) -> None:
    """Write ``index`` to ``path``; on return it is on disk, whole."""
    with atomic_path(path) as temporary:
        temporary.write_text(index.text(), encoding="utf-8")


def parse_index(text: str, origin: str) -> Index:
    """Return what the JSON ``text`` of ``origin`` says.

    Raises:
        CheckpointError: it is not whole, or another format or version.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{origin} is not valid JSON: {error}") from None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise CheckpointError(f"{origin} is not the index of a checkpoint of format {FORMAT}")
    if value.get("version") != VERSION:
        raise CheckpointError(
            f"{origin} has format version {value.get('version')}, this program reads {VERSION}; "
            "use the program that wrote it, or a newer one"
        )
    if value.get("byteorder") != sys.byteorder:
        raise CheckpointError(f"{origin} was written on a {value.get('byteorder')}-endian machine")
    body, marker, _ = text.rpartition('"checksum": ')
    if value.get("checksum") != _digest(body + marker):
        raise CheckpointError(
            f"{origin} does not match its own checksum: it was changed or damaged"
        )
    try:
        tensors = {str(key): _unpack(item) for key, item in value["tensors"].items()}
        files = {str(name): int(size) for name, size in value["files"].items()}
        facts = dict(value["facts"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{origin} is malformed: {error!r}") from None
    index = Index(facts, files, tensors)
    _check_places(index, origin)
    return index


def _check_places(index: Index, origin: str) -> None:
    """Refuse an index that leads outside of the files of its folder."""
    strange = [name for name in index.files if not _is_plain(name)]
    if strange:
        raise CheckpointError(f"{origin} names files outside of its folder: {strange}")
    for key, tensor in index.tensors.items():
        for box in tensor.boxes:
            size = index.files.get(box.file, -1)
            if not 0 <= box.offset <= size - tensor.bytes_of(box):
                raise CheckpointError(
                    f"{origin}: {key} has a box at byte {box.offset} of {box.file}, which is in no "
                    "file of this checkpoint"
                )


def _is_plain(name: str) -> bool:
    """Return whether a name can be that of a file in a folder."""
    is_text = name.isprintable() and not any("\ud800" <= letter <= "\udfff" for letter in name)
    return is_text and name not in ("", ".", "..") and Path(name).name == name


def read_index(folder: Path) -> Index:
    """Return the index of a checkpoint folder.

    Raises:
        CheckpointError: it is absent, not whole, or of another version.
    """
    path = folder / INDEX
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise CheckpointError(f"{path} is no file")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {INDEX}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    return parse_index(text, str(path))


def open_complete(folder: Path) -> Index:
    """Return the index of a complete checkpoint.

    Raises:
        CheckpointError: the index is not whole, or a file is absent or has another size.
    """
    index = read_index(folder)
    for name, size in index.files.items():
        try:
            found = os.stat(folder / name).st_size
        except OSError:
            raise CheckpointError(f"{folder / name} is missing") from None
        if found != size:
            raise CheckpointError(f"{folder / name} has {found} bytes instead of {size}")
    return index
