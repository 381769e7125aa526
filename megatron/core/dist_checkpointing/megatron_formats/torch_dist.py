"""Megatron-core's ``torch_dist`` folders as an index of boxes, and Megatron's ``torch_dcp`` too.

Each layer of a stacked tensor becomes a tensor of ours, whose boxes are parts of the stored chunks;
no byte is moved or read for that.

Optimizer states are ``optimizer.state.KIND.KEY``, KIND being ``fp32_param`` (our master),
``exp_avg`` ... Where replicas shared them out, an older Megatron stored a flat range of each
rank's part: the shape is then [parts along each dim ..., elements of a part].
States as plain buckets (``dp_reshardable``) belong to the layout that wrote them and are left out.
"""

import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.boxes import volume
from megatron.core.dist_checkpointing.format import (
    DTYPES,
    CheckpointError,
    Index,
    StoredBox,
    StoredTensor,
)
from megatron.core.dist_checkpointing.megatron_formats import common, dcp, names
from megatron.core.dist_checkpointing.megatron_formats.archive import open_file
from megatron.core.sharding import Box, local_boxes

NAME = "torch_dist"
COMMON = "common.pt"
_STATE = re.compile(r"^(?:optimizer|chained_\d+|\.)+\.state\.([A-Za-z0-9_]+)\.(.+)$")
_BUCKETS = re.compile(r"^(?:optimizer|chained_\d+|\.)+\.distributed\.")
MASTER = "fp32_param"
"""Kind of the fine copy of a coarse weight."""


def read_index(path: Path) -> Index:
    """Return the index of a folder.

    Raises:
        CheckpointError: it is not whole, or holds something in a way that is not known.
    """
    folder = dcp.read_folder(path)
    state = _common(path, folder)
    weights, states, buckets = _sorted(folder)
    dcp.locate(folder, [*weights.values(), *states.values()])
    index = Index(files=folder.files, format=NAME, blocks=folder.blocks)
    for key, stored in weights.items():
        for name, tensor in _unstacked(key, folder.tensors[stored]):
            index.tensors[f"model.{name}"] = tensor
    for (kind, key), stored in states.items():
        shape = folder.tensors[weights[key]].shape if key in weights else None
        ours = "master" if kind == MASTER else kind
        for name, tensor in _unstacked(key, _whole(folder.tensors[stored], shape)):
            index.tensors[f"optimizer.{ours}.{name}"] = tensor
    index.facts = common.facts(state, has_states=bool(states), buckets=buckets)
    common.mark_padding(index)
    return index


def _common(path: Path, folder: dcp.Folder) -> dict[str, Any]:
    """Return the state that is no tensor: an entry of the files, or a file of its own."""
    for key in folder.objects:
        if key.partition("/")[0] == "common_state":
            value = folder.object(key)
            return _dict(value[0] if isinstance(value, list) and value else value, path)
    if (path / COMMON).exists():
        with open_file(path / COMMON) as archive:
            return _dict(archive.small(archive.value), path)
    # torch_dcp: each leaf of the state is an entry.
    leaves = ("iteration", "checkpoint_version", "args", "num_floating_point_operations_so_far")
    return {key: folder.object(key) for key in leaves if key in folder.objects}


def _dict(value: Any, path: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: the common state is a {type(value).__name__}, not a dict")
    return value


def _sorted(folder: dcp.Folder) -> tuple[dict[str, str], dict[tuple[str, str], str], bool]:
    """Return stored keys of weights by name and of states by (kind, name), if there are buckets."""
    weights: dict[str, str] = {}
    states: dict[tuple[str, str], str] = {}
    buckets = False
    for stored in folder.tensors:
        match = _STATE.match(stored)
        if match is not None:
            states[match.group(1), _bare(match.group(2))] = stored
        elif _BUCKETS.match(stored):
            buckets = True
        elif not stored.startswith(("optimizer.", "rng_state", "rerun_state")):
            if names.is_weight(stored):
                weights[_bare(stored)] = stored
    # States of torch_dcp are numbered, not named.
    states = {at: key for at, key in states.items() if at[1] in weights}
    return weights, states, buckets


def _bare(key: str) -> str:
    return re.sub(r"^(model\.|module\.|model\d+\.|model_\d+\.)+", "", key)


def _unstacked(key: str, tensor: dcp.Tensor) -> Iterator[tuple[str, StoredTensor]]:
    """Yield our names and tensors of one of Megatron's."""
    if not names.is_stacked(key):
        boxes = [StoredBox(c.box, c.file, c.offset, None) for c in tensor.chunks]
        yield names.to_ours(key), StoredTensor(tensor.dtype, tensor.shape, boxes)
        return
    layers = [StoredTensor(tensor.dtype, tensor.shape[1:]) for _ in range(tensor.shape[0])]
    for chunk in tensor.chunks:
        (first, last), rest = chunk.box[0], chunk.box[1:]
        size = volume(rest) * DTYPES[tensor.dtype].itemsize
        for layer in range(first, last):
            offset = chunk.offset + (layer - first) * size
            layers[layer].boxes.append(StoredBox(rest, chunk.file, offset, None))
    for number, layer_tensor in enumerate(layers):
        yield names.to_ours(key, number), layer_tensor


def _whole(tensor: dcp.Tensor, shape: tuple[int, ...] | None) -> dcp.Tensor:
    """Return a state in the shape of its weight, where flat ranges of parts were stored."""
    if shape is None or len(tensor.shape) != len(shape) + 1:
        return tensor
    parts = tensor.shape[:-1]
    local = tuple(size // count for size, count in zip(shape, parts, strict=True))
    if math.prod(shape) != math.prod(tensor.shape) or math.prod(local) != tensor.shape[-1]:
        raise CheckpointError(f"a state of shape {list(shape)} is stored as {list(tensor.shape)}")
    whole = dcp.Tensor(tensor.dtype, shape)
    size = DTYPES[tensor.dtype].itemsize
    for chunk in tensor.chunks:
        start, stop = chunk.box[-1]
        held = itertools.product(*(range(*extent) for extent in chunk.box[:-1]))
        for number, part in enumerate(held):
            origin = [n * extent for n, extent in zip(part, local, strict=True)]
            first = chunk.offset + number * (stop - start) * size
            for box, offset in local_boxes(local, start, stop):
                at = first + (offset - start) * size
                place = dcp.Chunk(_moved(box, origin), chunk.file, chunk.start, chunk.length, at)
                whole.chunks.append(place)
    return whole


def _moved(box: Box, origin: list[int]) -> Box:
    return tuple((a + first, b + first) for (a, b), first in zip(box, origin, strict=True))
