"""Reading a checkpoint whose files hold boxes as raw bytes, box by box.

`Checkpoint` is the `interface.Reader` of our own format and of those of Megatron-LM, whose index is
worked out from theirs (`detect.open_index`). It reads only the bytes that are needed, a chunk at a
time, and straight into place where that is contiguous host memory of the same dtype.
"""

import math
import os
import threading
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.boxes import (
    intersection,
    relative,
    spans,
    uncovered,
    volume,
    whole_box,
)
from megatron.core.dist_checkpointing.checksum import joined
from megatron.core.dist_checkpointing.detect import open_index
from megatron.core.dist_checkpointing.format import (
    BLOCK,
    CHUNK,
    Block,
    CheckpointError,
    Index,
    StoredBox,
    StoredTensor,
)
from megatron.core.dist_checkpointing.plan import Piece
from megatron.core.progress import Told, untold
from megatron.core.sharding import Box, box_shape, box_slices

READERS = 4
"""Threads that read: a disk serves several at once, and checksums take longer than reading."""


class DamagedError(CheckpointError):
    """Bytes of a checkpoint are not those that were written."""


class Checkpoint:
    """A complete checkpoint, open for reading; close it or use it in a ``with`` block."""

    def __init__(self, folder: Path, index: Index | None = None) -> None:
        self.folder = folder
        self.index = index if index is not None else open_index(folder)
        self._descriptors: dict[str, int] = {}
        self._opening, self._local = threading.Lock(), threading.local()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    @property
    def format(self) -> str:
        """Return the name of the format."""
        return self.index.format

    @property
    def facts(self) -> dict[str, Any]:
        """Return what the run said about itself."""
        return self.index.facts

    @property
    def files(self) -> dict[str, int]:
        """Return size in bytes by name."""
        return self.index.files

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """Return the stored tensors by key."""
        return self.index.tensors

    @property
    def hash(self) -> str:
        """Return the hash of the content."""
        return self.index.hash

    def read(self, key: str, box: Box | None = None) -> Tensor:
        """Return a tensor, or one box of it, in the stored dtype."""
        stored = self.index.tensors[key]
        wanted = box if box is not None else whole_box(stored.shape)
        out = torch.empty(box_shape(wanted), dtype=stored.torch_dtype)
        self.fill(key, Piece(wanted, out))
        return out

    def fill(self, key: str, piece: Piece) -> None:
        """Read one box of a tensor into a view, converting to its dtype."""
        stored = self.index.tensors[key]
        found = 0
        for number, box in enumerate(stored.boxes):
            common = intersection(box.box, piece.box)
            if common is None:
                continue
            target = piece.tensor[box_slices(relative(common, piece.box))]
            self._fill_from(key, number, common, target)
            found += volume(common)
        assert found == volume(piece.box), f"{key} {piece.box}: {found} elements found"

    def _fill_from(self, key: str, number: int, common: Box, target: Tensor) -> None:
        """Read a box of a tensor, which lies in its stored box ``number``, into a view."""
        stored = self.index.tensors[key]
        box = stored.boxes[number]
        wanted = box_slices(relative(common, box.box))
        self._fill(stored, box, box_shape(box.box), box.offset, wanted, target)

    def _fill(
        self,
        stored: StoredTensor,
        box: StoredBox,
        shape: Sequence[int],
        offset: int,
        wanted: Sequence[slice],
        target: Tensor,
    ) -> None:
        """Read ``wanted`` of the block of ``shape`` at ``offset`` of a file into ``target``."""
        size = stored.torch_dtype.itemsize
        row = math.prod(shape[1:]) * size
        rows = wanted[0] if wanted else slice(0, 1)
        inner = tuple(wanted[1:])
        whole = all(w == slice(0, extent) for w, extent in zip(inner, shape[1:], strict=True))
        if not whole and row > CHUNK // 16:
            # Wide rows of which a part is wanted: look into each.
            for number in range(rows.start, rows.stop):
                place = offset + number * row
                self._fill(stored, box, shape[1:], place, inner, target[number - rows.start])
            return
        direct = (
            whole
            and target.is_contiguous()
            and target.dtype == stored.torch_dtype
            and target.device.type == "cpu"
        )
        step = max(CHUNK // row, 1) if row else 1
        target = target if wanted else target.reshape(1)
        for first, last in spans(rows.start, rows.stop, step):
            part = target[first - rows.start : last - rows.start]
            length = (last - first) * row
            raw = part.reshape(-1).view(torch.uint8) if direct else self._scratch(length)
            self._read(box.file, raw, offset + first * row)
            if not direct:
                block = raw.view(stored.torch_dtype).view(last - first, *shape[1:])
                part.copy_(block[(slice(None), *inner)])

    def _scratch(self, length: int) -> Tensor:
        """Return memory of this thread for so many bytes."""
        buffer: Tensor | None = getattr(self._local, "buffer", None)
        if buffer is None or buffer.numel() < length:
            buffer = self._local.buffer = torch.empty(max(length, CHUNK), dtype=torch.uint8)
        return buffer[:length]

    def _open(self, file: str) -> int:
        with self._opening:
            if file not in self._descriptors:
                try:
                    self._descriptors[file] = os.open(self.folder / file, os.O_RDONLY)
                except OSError as error:
                    raise CheckpointError(f"{self.folder / file} cannot be read: {error}") from None
            return self._descriptors[file]

    def _read(self, file: str, out: Tensor, offset: int) -> None:
        """Fill a flat uint8 tensor from a file."""
        descriptor = self._open(file)
        view = memoryview(out.numpy())  # type: ignore[arg-type]
        while view:
            got = os.preadv(descriptor, [view], offset)
            if got == 0:
                raise CheckpointError(f"{self.folder / file} ends at byte {offset}")
            view, offset = view[got:], offset + got

    def damages(
        self,
        files: Iterable[str] | None = None,
        told: Told = untold,
    ) -> list[str]:
        """Return what does not match its checksum, tensor by tensor (in ``files``, or in all).

        Coverage is checked too: whoever changed an index with care could have left out a box.
        ``told`` hears of each piece that was read: its tensor and its size in bytes.
        """
        holes = {
            key: uncovered(stored.shape, [box.box for box in stored.boxes])
            for key, stored in self.index.tensors.items()
        }
        problems = [f"{key}: {hole}" for key, hole in holes.items() if hole is not None]
        return problems + self._mismatches(self.index.files if files is None else files, told)

    def _mismatches(self, files: Iterable[str], told: Told) -> list[str]:
        """Return which blocks of ``files`` do not match their checksums."""
        problems, chosen = list[str](), set(files)
        blocks = [
            Block(key, box.file, box.offset, stored.bytes_of(box), box.crc32)
            for key, stored in self.index.tensors.items()
            for box in stored.boxes
            if box.crc32 is not None
        ]
        blocks = [block for block in (*blocks, *self.index.blocks) if block.file in chosen]
        chunks = [
            (number, first, last)
            for number, block in enumerate(blocks)
            for first, last in spans(0, block.length, CHUNK)
        ]
        found = [0] * len(blocks)
        with ThreadPoolExecutor(READERS) as readers:
            checksums = readers.map(lambda c: self._crc32(blocks[c[0]], c[1], c[2]), chunks)
            for (number, first, last), crc in zip(chunks, checksums, strict=True):
                found[number] = joined(found[number], crc, last - first)
                told(blocks[number].key, last - first)
        for block, crc in zip(blocks, found, strict=True):
            if crc != block.crc32:
                place = f"{block.file} from byte {block.offset}"
                problems.append(f"{block.key}: {place} does not match its checksum")
        return problems

    def _crc32(self, block: Block, start: int, stop: int) -> int:
        """Return the checksum of bytes ``start`` to ``stop`` of a block."""
        crc = 0
        for first, last in spans(start, stop, BLOCK):
            raw = self._scratch(last - first)
            self._read(block.file, raw, block.offset + first)
            crc = zlib.crc32(memoryview(raw.numpy()), crc)  # type: ignore[arg-type]
        return crc
