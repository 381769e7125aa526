"""Writing a checkpoint that fits in no memory: one slab of one tensor at a time.

Tools copy and convert checkpoints of any size on a machine of any size. `write` asks for slabs,
boxes of at most a chunk's bytes, in the order in which they lie in the files, and publishes the
result as a save of a run is published: whole or not at all.

Tensors become large boxes: one each, but for those that lie on the border between two files, which
are cut between rows.
"""

import math
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.boxes import slabs, volume, whole_box
from megatron.core.dist_checkpointing.format import (
    ALIGNMENT,
    CHUNK,
    DTYPES,
    Index,
    StoredBox,
    StoredTensor,
    write_index,
)
from megatron.core.dist_checkpointing.part import mark, write_all
from megatron.core.dist_checkpointing.publishing import building
from megatron.core.dist_checkpointing.save import check_space, publish
from megatron.core.progress import Told, untold
from megatron.core.sharding import Box
from megatron.core.utils import round_up

ReadSlab = Callable[[str, Box], Tensor]
"""Returns a box of a tensor by its name, contiguous, in host memory."""


@dataclass(frozen=True)
class Shape:
    """What a tensor is, without its values."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        """Return the bytes of an element."""
        return DTYPES[self.dtype].itemsize

    @property
    def bytes(self) -> int:
        """Return the bytes of all elements."""
        return math.prod(self.shape) * self.itemsize


def share_out(tensors: Mapping[str, Shape], files: int) -> list[list[tuple[str, Box]]]:
    """Return what each of ``files`` files holds: even shares, whole tensors where possible.

    Order is that of ``tensors``. A border falls between two rows of a tensor, so a share is uneven
    by a row at the most.
    """
    total = sum(tensor.bytes for tensor in tensors.values())
    shares: list[list[tuple[str, Box]]] = [[] for _ in range(files)]
    done = 0

    def number(place: int) -> int:
        return min(place * files // total, files - 1) if total else 0

    for key, tensor in tensors.items():
        inner = whole_box(tensor.shape[1:])
        rows = tensor.shape[0] if tensor.shape else 1
        row = tensor.bytes // rows if rows else 0
        start = 0
        while start < rows:
            at = number(done)
            stop = rows
            if at < files - 1 and row:
                border = -(-total * (at + 1) // files)
                stop = min(rows, start + max(-(-(border - done) // row), 1))
            box = ((start, stop), *inner) if tensor.shape else ()
            if row:
                shares[at].append((key, box))
            done += (stop - start) * row
            start = stop
    return shares


def write(
    final: Path,
    tensors: Mapping[str, Shape],
    read: ReadSlab,
    facts: Mapping[str, Any],
    *,
    files: int = 1,
    told: Told = untold,
) -> Index:
    """Write and publish a checkpoint; return its index.

    Args:
        final: its folder, which is replaced if there is one.
        tensors: all that it holds, in the order of its files.
        read: gives the values; its results have the dtype that ``tensors`` says.
        facts: what it says of itself.
        files: how many to write.
        told: hears of each slab that is written: its tensor and its size in bytes.

    Raises:
        CheckpointError: there is no room for it.
        OSError: the file system failed. Nothing is left behind, unless the message says so.
    """
    with building(final) as partial:
        check_space(partial, sum(round_up(one.bytes, ALIGNMENT) for one in tensors.values()))
        for number, share in enumerate(share_out(tensors, files)):
            part = _write_file(partial, number, tensors, share, read, told)
            write_index(part, partial / mark(number))
        return publish(partial, final, files, facts)


def _write_file(
    partial: Path,
    number: int,
    tensors: Mapping[str, Shape],
    share: Sequence[tuple[str, Box]],
    read: ReadSlab,
    told: Told,
) -> Index:
    """Write one file and return its part of the index."""
    index = Index()
    for key, tensor in tensors.items():
        index.tensors[key] = StoredTensor(tensor.dtype, tensor.shape)
    if not share:
        return index
    name, offset = f"part{number:05d}.bin", 0
    with open(partial / name, "wb", buffering=0) as file:
        for key, box in share:
            stored, crc = index.tensors[key], 0
            for slab in slabs(box, tensors[key].itemsize, CHUNK):
                data = as_bytes(read(key, slab))
                crc = zlib.crc32(data, crc)
                write_all(file.fileno(), data)
                told(key, len(data))
            length = volume(box) * tensors[key].itemsize
            write_all(file.fileno(), memoryview(bytes(-length % ALIGNMENT)))
            stored.boxes.append(StoredBox(box, name, offset, crc))
            offset += round_up(length, ALIGNMENT)
        os.fsync(file.fileno())
    index.files[name] = offset
    return index


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory, without a copy."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]
