"""Writing a checkpoint of any format as Megatron-core's ``torch_dist``, a piece at a time.

The files are those of ``torch.distributed.checkpoint``: archives of ``torch.save`` one after the
other, and a pickle that says where each lies. They are written here and not by its own writer,
which holds a chunk of every tensor of a file until the file is done. Nothing of the result has a
layout: Megatron-core cuts what it needs out of any chunks.
"""

import io
import itertools
import json
import math
import os
import pickle
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron.core.dist_checkpointing.boxes import spans, whole_box
from megatron.core.dist_checkpointing.format import CheckpointError
from megatron.core.dist_checkpointing.interface import Reader
from megatron.core.dist_checkpointing.megatron_formats import names, state
from megatron.core.dist_checkpointing.megatron_formats.dcp import METADATA
from megatron.core.dist_checkpointing.megatron_formats.torch_dist import COMMON, MASTER
from megatron.core.dist_checkpointing.publishing import building, put_in_place
from megatron.core.dist_checkpointing.save import check_space
from megatron.core.sharding import Box
from megatron.core.utils import UserError

LARGEST = 256 * 2**20
"""Bytes of a chunk; larger tensors are cut between rows."""
_EXPORTED = ("model", "optimizer")
"""What the names of our tensors begin with that have one of theirs."""
_DATA = "__0_0.distcp"
_BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}


@dataclass(frozen=True)
class _Entry:
    """A tensor as it is to be stored: one of ours, or the layers of a stack."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    """Our keys, in the order of the first dim where ``stacked``."""
    stacked: bool

    @property
    def bytes(self) -> int:
        """Return the bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize


def check_exported_kind(facts: Mapping[str, Any], folder: Path, flags: str) -> None:
    """Refuse a checkpoint of a model whose names in ``torch_dist`` are not known yet.

    Args:
        facts: of the checkpoint.
        folder: of the checkpoint.
        flags: those that ask for the format.

    Raises:
        UserError: it is of an encoder alone or of an encoder-decoder.
    """
    config = facts.get("config") or {}
    if config.get("encoder_alone"):
        what, others = "an encoder alone (pretrain_bert.py)", ""
    elif config.get("decoder_num_layers") is not None:
        what = "an encoder-decoder (pretrain_t5.py)"
        others = ", and --to hf a T5ForConditionalGeneration, where that class computes the same"
    else:
        return
    raise UserError(
        f"{flags}: {folder} is of {what}, whose names there are not known yet; "
        f"tools/checkpoint.py convert --to megatron writes this project's format{others}"
    )


def export_torch_dist(
    reader: Reader, folder: Path, told: Callable[[str, int], None] = lambda key, size: None
) -> None:
    """Write weights, optimizer and facts of a checkpoint to ``folder``; it appears when whole.

    Args:
        reader: any format.
        folder: of the one checkpoint, such as ``DIR/iter_0000010``; an older one is replaced.
        told: hears of each piece that was written: its key and its size in bytes.

    Raises:
        CheckpointError: there are layers that do not make a stack, no weights, or no room.
        OSError: the file system failed; ``folder`` is then as it was.
    """
    entries = _entries(reader)
    with building(folder) as partial:
        has_masters = any(key.startswith("optimizer.master.") for key in reader.tensors)
        common = state.common_state(reader.facts, has_masters=has_masters)
        check_space(partial, sum(entry.bytes for entry in entries.values()))
        _write(reader, entries, common, partial, folder.name, told)
        put_in_place(partial, folder)


def left_out(reader: Reader) -> str:
    """Return in words what of a checkpoint an export does not hold; nothing where it holds all."""
    others = sorted(key for key in reader.tensors if key.partition(".")[0] not in _EXPORTED)
    generators = [key for key in others if key.startswith("random.")]
    lost = [key for key in others if key not in generators]
    if generators:
        lost.append(
            f"the generators of {len(generators)} rank(s): whoever goes on starts from its seed"
        )
    return ", ".join(lost)


def _entries(reader: Reader) -> dict[str, _Entry]:
    """Return what is to be stored by Megatron-core's keys."""
    weights = {key[6:] for key in reader.tensors if key.startswith("model.")}
    if not weights:
        raise CheckpointError(f"{reader.folder} holds no weights of a model")
    stacks: dict[str, dict[int, str]] = defaultdict(dict)
    entries = {}
    for key in reader.tensors:
        part, _, name = key.partition(".")
        prefix = ""
        if part == "optimizer":
            kind, _, name = name.partition(".")
            prefix = f"optimizer.state.{MASTER if kind == 'master' else kind}."
        elif part != "model":
            continue
        theirs, layer = names.to_megatron(name, weights)
        if layer is None:
            tensor = reader.tensors[key]
            entries[prefix + theirs] = _Entry(tensor.torch_dtype, tensor.shape, (key,), False)
        else:
            stacks[prefix + theirs][layer] = key
    layers = {layer for parts in stacks.values() for layer in parts}
    if any(parts.keys() != layers for parts in stacks.values()):  # they are not all alike
        for stack, parts in stacks.items():
            for layer, key in parts.items():
                tensor = reader.tensors[key]
                alone = stack.replace(names.STACK, f"{names.STACK}{layer}.")
                entries[alone] = _Entry(tensor.torch_dtype, tensor.shape, (key,), False)
        return entries
    return {**entries, **{key: _stack(reader, key, parts) for key, parts in stacks.items()}}


def _stack(reader: Reader, key: str, parts: dict[int, str]) -> _Entry:
    keys = tuple(parts[layer] for layer in sorted(parts))
    kinds = {(reader.tensors[part].torch_dtype, reader.tensors[part].shape) for part in keys}
    if len(kinds) > 1 or sorted(parts) != list(range(len(parts))):
        raise CheckpointError(
            f"{reader.folder}: {key} is not alike in all layers, so it cannot be stacked: "
            f"layers {sorted(parts)}, shapes {sorted(list(shape) for _, shape in kinds)}"
        )
    dtype, shape = kinds.pop()
    return _Entry(dtype, (len(keys), *shape), keys, True)


def _shards(key: str, entry: _Entry) -> Iterator[str]:
    """Yield the names of a linear layer's entries ``_extra_state``: of each layer and expert."""
    sizes = [len(entry.parts)]
    if names.EXPERTS in key:
        shape = entry.shape[1:] if entry.stacked else entry.shape
        sizes = [*sizes * entry.stacked, shape[0]]
    for numbers in itertools.product(*map(range, sizes)):
        yield f"shard_{'.'.join(map(str, numbers))}_{'.'.join(map(str, sizes))}"


def _pieces(entry: _Entry) -> Iterator[tuple[tuple[int, ...], str, Box]]:
    """Yield (offsets in the entry, our key, box of ours), each of at most `LARGEST` bytes."""
    shape = entry.shape[1:] if entry.stacked else entry.shape
    row = entry.dtype.itemsize * math.prod(shape[1:])
    step = max(LARGEST // row, 1) if row else 1
    for number, key in enumerate(entry.parts):
        first = (number,) if entry.stacked else ()
        rest = whole_box(shape[1:])
        if not shape:
            yield first, key, ()
            continue
        for start, stop in spans(0, shape[0], step):
            offsets = (*first, start, *(0 for _ in rest))
            yield offsets, key, ((start, stop), *rest)


class _Writer:
    """A ``.distcp`` file under way, and what there is to say of it."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.kinds: dict[str, Any] = {}
        self.places: dict[MetadataIndex, _StorageInfo] = {}

    def object(self, key: str, value: Any) -> None:
        self.kinds[key] = BytesStorageMetadata()
        self._put(MetadataIndex(key), value)

    def piece(self, key: str, entry: _Entry, offsets: tuple[int, ...], data: torch.Tensor) -> None:
        tensor = data.unsqueeze(0) if entry.stacked else data
        chunk = ChunkStorageMetadata(torch.Size(offsets), tensor.shape)
        properties = TensorProperties(dtype=entry.dtype)
        kind = self.kinds.setdefault(
            key, TensorStorageMetadata(properties, torch.Size(entry.shape), [])
        )
        self._put(MetadataIndex(key, chunk.offsets, len(kind.chunks)), tensor)
        kind.chunks.append(chunk)

    def _put(self, index: MetadataIndex, value: Any) -> None:
        # One archive after the other, each counting from its own start.
        archive = io.BytesIO()
        torch.save(value, archive)
        start, length = self._stream.tell(), archive.getbuffer().nbytes
        self._stream.write(archive.getbuffer())
        self.places[index] = _StorageInfo(_DATA, start, length)


def _write(
    reader: Reader,
    entries: dict[str, _Entry],
    common: dict[str, Any],
    folder: Path,
    name: str,
    told: Callable[[str, int], None],
) -> None:
    with open(folder / _DATA, "wb") as stream:
        writer = _Writer(stream)
        for key, entry in entries.items():
            if names.LINEARS.search(f".{key}") and not key.startswith("optimizer."):
                for shard in _shards(key, entry):
                    writer.object(f"{key.removesuffix('weight')}_extra_state/{shard}", [None])
        writer.object("common_state/shard_0_1", [common])
        for key, entry in entries.items():
            for offsets, ours, box in _pieces(entry):
                data = reader.read(ours, box)
                writer.piece(key, entry, offsets, data)
                told(key, data.nbytes)
        _sync(stream)
    with open(folder / COMMON, "wb") as file:
        torch.save(common, file)
        _sync(file)
    with open(folder / "metadata.json", "wb") as file:
        file.write(json.dumps(_BACKEND).encode())
        _sync(file)
    metadata = Metadata(writer.kinds)
    metadata.storage_data = writer.places
    metadata.storage_meta = StorageMeta(name, str(uuid.uuid4()))
    with open(folder / METADATA, "wb") as file:
        pickle.dump(metadata, file)
        _sync(file)


def _sync(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())
