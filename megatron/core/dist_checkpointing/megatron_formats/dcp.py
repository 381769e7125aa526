"""Files of ``torch.distributed.checkpoint``: ``.metadata``, a pickle, and ``.distcp`` files.

A tensor is stored in chunks, each a box of it and an archive of ``torch.save`` at an offset of a
file; other objects are archives too.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)

from megatron.core.dist_checkpointing.format import Block, CheckpointError, dtype_name
from megatron.core.dist_checkpointing.megatron_formats.archive import Archive
from megatron.core.dist_checkpointing.megatron_formats.unpickling import Lazy, unpickle
from megatron.core.sharding import Box, box_shape

METADATA = ".metadata"


@dataclass
class Chunk:
    """One box of a stored tensor, and where its archive lies."""

    box: Box
    file: str
    start: int
    length: int
    offset: int = -1
    """Of the first byte in the file, once it is located."""


@dataclass
class Tensor:
    """A tensor as the files hold it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: list[Chunk] = field(default_factory=list)


@dataclass
class Folder:
    """What ``.metadata`` says."""

    path: Path
    tensors: dict[str, Tensor]
    objects: dict[str, tuple[str, int, int]]
    """File, start and length by key."""
    files: dict[str, int]
    blocks: list[Block] = field(default_factory=list)

    def object(self, key: str) -> Any:
        """Return a small object, its tensors of one element as numbers."""
        file, start, length = self.objects[key]
        with opened(self.path, [file]) as descriptors:
            archive = Archive(descriptors[file], start, length, f"{key} in {self.path / file}")
            return archive.small(archive.value)


def read_folder(path: Path) -> Folder:
    """Return what a folder holds.

    Raises:
        CheckpointError: it is not whole, or written in a way that is not known.
    """
    try:
        data = (path / METADATA).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path / METADATA} cannot be read: {error}") from None
    metadata = unpickle(data, str(path / METADATA))
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError(f"{path / METADATA} is not metadata of torch.distributed.checkpoint")
    folder = Folder(path, {}, {}, {})
    ends: dict[str, int] = {}
    places = {}
    for index, place in metadata.storage_data.items():
        if Path(place.relative_path).name != place.relative_path:
            raise CheckpointError(f"{path} names a file outside of it: {place.relative_path}")
        if getattr(place, "transform_descriptors", None):
            raise CheckpointError(f"{path}: compressed or encrypted files cannot be read")
        places[index.fqn, tuple(index.offset or ())] = place
        end = place.offset + place.length
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), end)
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            place = places[key, ()]
            folder.objects[key] = (place.relative_path, place.offset, place.length)
        elif isinstance(entry, TensorStorageMetadata):
            folder.tensors[key] = _tensor(path, key, entry, places)
    folder.files = _sizes(path, ends)
    return folder


def _tensor(path: Path, key: str, entry: TensorStorageMetadata, places: dict[Any, Any]) -> Tensor:
    tensor = Tensor(dtype_name(entry.properties.dtype), tuple(entry.size))
    for chunk in entry.chunks:
        place = places.get((key, tuple(chunk.offsets)))
        if place is None:
            raise CheckpointError(f"{path}: the place of {key} {list(chunk.offsets)} is not known")
        box = tuple((a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))
        tensor.chunks.append(Chunk(box, place.relative_path, place.offset, place.length))
    return tensor


def _sizes(path: Path, ends: dict[str, int]) -> dict[str, int]:
    sizes = {}
    for name, end in ends.items():
        try:
            sizes[name] = os.stat(path / name).st_size
        except OSError:
            raise CheckpointError(f"{path / name} is missing") from None
        if sizes[name] < end:
            raise CheckpointError(f"{path / name} has {sizes[name]} bytes instead of {end}")
    return sizes


def locate(folder: Folder, keys: list[str]) -> None:
    """Find the bytes of the chunks of ``keys``; each takes some small reads.

    Raises:
        CheckpointError: an archive is damaged, or a chunk is not stored row-major.
    """
    with opened(folder.path, folder.files) as descriptors, ThreadPoolExecutor(8) as readers:
        jobs = [(key, chunk) for key in keys for chunk in folder.tensors[key].chunks]

        def find(job: tuple[str, Chunk]) -> Block:
            key, chunk = job
            archive = Archive(
                descriptors[chunk.file], chunk.start, chunk.length, f"{key} in {chunk.file}"
            )
            return _found(key, folder.tensors[key].dtype, chunk, archive)

        folder.blocks += readers.map(find, jobs)


def _found(key: str, dtype: str, chunk: Chunk, archive: Archive) -> Block:
    value = archive.value
    where = f"{key} in {chunk.file} from byte {chunk.start}"
    if not isinstance(value, Lazy) or value.shape != box_shape(chunk.box):
        raise CheckpointError(f"{where} is not the tensor that {METADATA} says")
    if value.dtype != dtype or not value.is_contiguous:
        raise CheckpointError(f"{where} is not stored row-major as {dtype}")
    stored = archive.place(value)
    size = archive.itemsize(value)
    chunk.offset = stored.offset + value.start * size
    return Block(key, chunk.file, stored.offset, stored.size, stored.crc32)


@contextmanager
def opened(path: Path, names: Any) -> Iterator[dict[str, int]]:
    """Give descriptors of files by name."""
    descriptors: dict[str, int] = {}
    try:
        for name in names:
            descriptors[name] = os.open(path / name, os.O_RDONLY)
        yield descriptors
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
