"""Weights written as the transformers library stores them, a slab at a time."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron.bridge.files import SAFE
from megatron.bridge.safetensors import header_of
from megatron.core.dist_checkpointing.boxes import slabs, whole_box
from megatron.core.dist_checkpointing.format import CHUNK, DTYPES
from megatron.core.dist_checkpointing.part import write_all
from megatron.core.dist_checkpointing.publishing import building, put_in_place
from megatron.core.dist_checkpointing.save import check_space
from megatron.core.dist_checkpointing.stream import ReadSlab, Shape, as_bytes


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
    with open(path, "wb", buffering=0) as file:
        write_all(file.fileno(), memoryview(header_of(tensors)))
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
