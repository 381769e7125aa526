"""What ``torch.save`` wrote: a zip archive of one pickle and, uncompressed, the bytes of storages.

So a tensor in it is raw bytes at an offset of a file, with a checksum, which is all that our own
index says of a box. An archive may be a whole file, or one entry of a ``.distcp`` file.
"""

import io
import os
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.format import DTYPES, CheckpointError
from megatron.core.dist_checkpointing.megatron_formats.unpickling import Lazy, unpickle

_LOCAL_HEADER = 30
"""Bytes of the fixed part of a zip entry's header; lengths of name and extra field close it."""


class _Window(io.RawIOBase):
    """Bytes [start, start + length) of a file, as a file."""

    def __init__(self, descriptor: int, start: int, length: int) -> None:
        self._descriptor, self._start, self._length, self._at = descriptor, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(self._length - self._at, 0)]
        got = os.preadv(self._descriptor, [view], self._start + self._at) if view else 0
        self._at += got
        return got


@dataclass(frozen=True)
class Stored:
    """Where the bytes of a storage lie."""

    offset: int
    """In the file."""
    size: int
    crc32: int


class Archive:
    """One archive: its pickle with lazy tensors, and where their bytes lie.

    Raises:
        CheckpointError: it is no archive of today's ``torch.save``, or it is damaged.
    """

    def __init__(self, descriptor: int, start: int, length: int, origin: str) -> None:
        self._descriptor, self._start, self._origin = descriptor, start, origin
        try:
            self._zip = zipfile.ZipFile(io.BufferedReader(_Window(descriptor, start, length)))
        except zipfile.BadZipFile:
            raise CheckpointError(
                f"{origin} is not an archive of torch.save (or is cut off); one of a torch before "
                "1.6 has to be loaded and saved again by a newer torch"
            ) from None
        self._entries: Mapping[str, zipfile.ZipInfo] = {
            entry.filename.partition("/")[2]: entry for entry in self._zip.infolist()
        }

    @cached_property
    def value(self) -> Any:
        """Return what was saved, tensors being lazy."""
        if "data.pkl" not in self._entries:
            raise CheckpointError(f"{self._origin} holds no data.pkl")
        if self._order() != "little":
            raise CheckpointError(f"{self._origin} was written on a big-endian machine")
        try:
            data = self._zip.read(self._entries["data.pkl"])
        except (zipfile.BadZipFile, EOFError) as error:
            raise CheckpointError(f"{self._origin} is damaged: {error}") from None
        return unpickle(data, self._origin)

    def _order(self) -> str:
        entry = self._entries.get("byteorder")
        return self._zip.read(entry).decode() if entry is not None else "little"

    def place(self, tensor: Lazy) -> Stored:
        """Return where a tensor's storage lies.

        Raises:
            CheckpointError: it is not there, or not as raw bytes.
        """
        entry = self._entries.get(f"data/{tensor.storage}")
        if entry is None or entry.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(f"{self._origin} lacks the bytes of storage {tensor.storage}")
        at = self._start + entry.header_offset
        header = os.pread(self._descriptor, _LOCAL_HEADER, at)
        name, extra = struct.unpack("<HH", header[-4:])
        return Stored(at + _LOCAL_HEADER + name + extra, entry.file_size, entry.CRC)

    @staticmethod
    def itemsize(tensor: Lazy) -> int:
        """Return the bytes of an element."""
        return DTYPES[tensor.dtype].itemsize

    def read(self, tensor: Lazy) -> Tensor:
        """Return a small tensor."""
        stored = self.place(tensor)
        raw = os.pread(self._descriptor, stored.size, stored.offset)
        flat = torch.frombuffer(bytearray(raw), dtype=DTYPES[tensor.dtype])
        return flat.as_strided(tensor.shape, tensor.stride, tensor.start)

    def small(self, value: Any) -> Any:
        """Return ``value`` with its tensors of one element as numbers."""
        if isinstance(value, Lazy):
            single = all(size == 1 for size in value.shape)
            return self.read(value).item() if single else value
        if isinstance(value, dict):
            return {key: self.small(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.small(item) for item in value]
        return value


def open_file(path: Path) -> "OpenArchive":
    """Return an archive that is a whole file; use it in a ``with`` block.

    Raises:
        CheckpointError: it cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    return OpenArchive(descriptor, path)


class OpenArchive:
    """A file that holds one archive."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor, self._path = descriptor, path

    def __enter__(self) -> Archive:
        try:
            size = os.fstat(self._descriptor).st_size
            return Archive(self._descriptor, 0, size, str(self._path))
        except BaseException:
            os.close(self._descriptor)
            raise

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)
