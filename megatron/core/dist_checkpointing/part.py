"""One rank's part of a checkpoint: its file, several threads wide, and the done-mark after it.

Every piece has its place in the file before anything is written, so chunks may come in any order
and from several threads; each checks and writes what it has at once, tells the disk to begin, and
checksums of chunks are joined into those of boxes. Only what is not contiguous or not in host
memory is copied, into one chunk of memory for each thread. Python's lock is free meanwhile:
checksums, copies and writes all let go of it, so a training loop beside them loses processor time
and memory bandwidth, no more.
"""

import ctypes
import os
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.boxes import spans
from megatron.core.dist_checkpointing.checksum import joined
from megatron.core.dist_checkpointing.format import (
    ALIGNMENT,
    BLOCK,
    CHUNK,
    Index,
    StoredBox,
    StoredTensor,
    dtype_name,
    write_index,
)
from megatron.core.dist_checkpointing.plan import Piece, chunks, values
from megatron.core.dist_checkpointing.staging import Staged
from megatron.core.utils import round_up, usable_cores

WRITERS = 4
"""Threads that write a part, at most: one checks about a gigabyte in a second, disks take more."""
_START_WRITING = 2
"""Linux's ``SYNC_FILE_RANGE_WRITE``."""
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class AbandonedError(OSError):
    """Writing was told to stop."""


@dataclass
class _Entry:
    """A piece and its place in the file."""

    key: str
    piece: Piece
    offset: int
    crc32: int = 0


class Part:
    """What one rank writes of a checkpoint.

    Args:
        staged: the pieces.
        folder: where to.
        rank: whose part it is.
    """

    def __init__(self, staged: Staged, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._copied, self._entries = staged.copied, list[_Entry]()
        self._index = Index()
        offset = 0
        for item in staged.items:
            # A key of which this rank holds nothing is listed too: somebody must hold it.
            self._index.tensors[item.key] = StoredTensor(dtype_name(item.dtype), item.shape)
            for piece in item.pieces:
                self._entries.append(_Entry(item.key, piece, offset))
                offset += round_up(piece.tensor.nbytes, ALIGNMENT)
        self._size = offset
        self._reason: OSError | None = None
        """Why no thread should go on."""
        self._local = threading.local()
        self._file: int | None = None
        if self._entries:
            self._file = os.open(folder / self._name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            try:
                os.ftruncate(self._file, self._size)
            except OSError:
                self.close()
                raise

    @property
    def _name(self) -> str:
        return f"rank{self._rank:05d}.bin"

    def put_views(self) -> None:
        """Write the pieces that training may change.

        Raises:
            OSError: the disk is full, or another failure of the file system.
        """
        self._put([e for number, e in enumerate(self._entries) if number not in self._copied])

    def put_copies(self, prepare: Callable[[], None] | None = None) -> None:
        """Write the pieces that are copies; raises as `put_views` does.

        Args:
            prepare: called in every writing thread before its first chunk.
        """
        copies = [entry for number, entry in enumerate(self._entries) if number in self._copied]
        self._put(copies, prepare)

    def finish(self) -> Index:
        """Return what was written, once it and the done-mark are on disk.

        Raises:
            OSError: as before.
        """
        for entry in self._entries:
            stored = StoredBox(entry.piece.box, self._name, entry.offset, entry.crc32)
            self._index.tensors[entry.key].boxes.append(stored)
        if self._file is not None:
            os.fsync(self._file)
            self._index.files[self._name] = self._size
        if self._reason is not None:
            raise self._reason
        write_index(self._index, self._folder / mark(self._rank))
        self.close()
        return self._index

    def stop(self) -> None:
        """Make a writing thread raise at its next chunk; may be called from any thread."""
        self._reason = AbandonedError("the save was given up")

    def close(self) -> None:
        """Close the file; what is not finished is not part of a checkpoint."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _put(self, entries: Sequence[_Entry], prepare: Callable[[], None] | None = None) -> None:
        chunks = [chunk for entry in entries for chunk in _chunks(entry)]
        if not chunks:
            return
        threads = min(WRITERS, len(chunks), usable_cores())
        with ThreadPoolExecutor(threads, initializer=prepare) as writers:
            checksums = writers.map(self._put_chunk, chunks)
            for (entry, data, _), crc in zip(chunks, checksums, strict=True):
                entry.crc32 = joined(entry.crc32, crc, data.nbytes)

    def _put_chunk(self, chunk: tuple[_Entry, Tensor, int]) -> int:
        """Write a chunk and return its checksum."""
        if self._reason is not None:
            raise self._reason
        assert self._file is not None
        entry, view, start = chunk
        data, crc = self._bytes(values(view, entry.piece.coded)), 0
        try:
            for first, last in spans(0, len(data), BLOCK):
                block = data[first:last]
                crc = zlib.crc32(block, crc)
                place = start + first
                while block:
                    written = os.pwrite(self._file, block, place)
                    block, place = block[written:], place + written
        except OSError as error:
            self._reason = error
            raise
        _start_writing(self._file, start, len(data))
        return crc

    def _bytes(self, tensor: Tensor) -> memoryview:
        """Return the bytes of a chunk, in host memory and row-major order."""
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            if not hasattr(self._local, "scratch"):
                self._local.scratch = torch.empty(CHUNK, dtype=torch.uint8)
            scratch = self._local.scratch[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            tensor = scratch.copy_(tensor)
        return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _start_writing(descriptor: int, offset: int, length: int) -> None:
    """Let the system send a range to the disk now, so that the flush at the end finds it there.

    Only a matter of time: other systems than Linux, and file systems that refuse, wait for the
    flush, which reports what goes wrong.
    """
    if _LIBC is not None:
        start, size = ctypes.c_int64(offset), ctypes.c_int64(length)
        _LIBC.sync_file_range(descriptor, start, size, _START_WRITING)


def mark(rank: int) -> str:
    """Return the name of a rank's done-mark."""
    return f"rank{rank:05d}.done"


def write_all(descriptor: int, data: memoryview) -> None:
    """Write all of ``data`` to a file that may take a part of it at a time."""
    while data:
        data = data[os.write(descriptor, data) :]


def write(staged: Staged, folder: Path, rank: int) -> Index:
    """Write one rank's boxes and then its done-mark into ``folder``; both are on disk on return.

    Raises:
        OSError: the disk is full, or another failure of the file system.
    """
    part = Part(staged, folder, rank)
    try:
        part.put_views()
        part.put_copies()
        return part.finish()
    finally:
        part.close()


def _chunks(entry: _Entry) -> Iterator[tuple[_Entry, Tensor, int]]:
    """Yield an entry's chunks in row-major order, each with its place in the file."""
    offset = entry.offset
    for block in chunks(entry.piece.tensor, CHUNK):
        yield entry, block, offset
        offset += block.nbytes
