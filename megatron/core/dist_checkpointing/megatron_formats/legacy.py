"""Megatron-LM's older format ``torch`` as an index of boxes: a file for each model-parallel rank.

    iter_0000010/mp_rank_01/model_optim_rng.pt          tensor-parallel rank 1, no pipeline
    iter_0000010/mp_rank_01_002/model_optim_rng.pt      of pipeline stage 2

A file holds ``model`` (``model0``, ``model1`` ... where a rank has several chunks): flat under
Megatron-core's names, or nested under those of the models before it. Layers are numbered from 0 in
each chunk; chunk 0 of all stages comes before chunk 1. Weights only: states of the optimizer are
numbered in an order that follows from the code that wrote them.

How ranks share a weight: rows of linear layers that widen (the two halves of a gated one apart),
columns of those that narrow, rows of the vocabulary; all others are whole on every rank.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.boxes import whole_box
from megatron.core.dist_checkpointing.format import (
    DTYPES,
    Block,
    CheckpointError,
    Index,
    StoredBox,
    StoredTensor,
)
from megatron.core.dist_checkpointing.megatron_formats import common, names
from megatron.core.dist_checkpointing.megatron_formats.archive import Archive, open_file
from megatron.core.dist_checkpointing.megatron_formats.unpickling import Lazy

NAME = "torch"
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_PLACE = re.compile(r"^mp_rank_(\d+)(?:_(\d+))?$")
_BY_ROWS = re.compile(
    r"(linear_qkv|linear_fc1|linear_q_proj|linear_q_up_proj|linear_kv_up_proj|eh_proj)\.(weight|bias)$"
    r"|word_embeddings\.weight$|output_layer\.(weight|bias)$|softmax_offset$"
)
_BY_COLUMNS = re.compile(r"(linear_proj|linear_fc2)\.weight$")
_OLD_NAMES = (
    (r"^language_model\.", ""),
    (r"^(encoder|transformer)\.", "decoder."),
    (r"\binput_norm\.", "input_layernorm."),
    (r"\bpost_attention_(layer)?norm\.", "pre_mlp_layernorm."),
    (r"\bfinal_norm\.", "final_layernorm."),
    (r"\b(self_)?attention\.query_key_value\.", "self_attention.linear_qkv."),
    (r"\b(self_)?attention\.dense\.", "self_attention.linear_proj."),
    (r"\bdense_h_to_4h\.", "linear_fc1."),
    (r"\bdense_4h_to_h\.", "linear_fc2."),
)
_OLD = "language_model"
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")


@dataclass(frozen=True)
class _Part:
    """A weight as one rank holds it."""

    tensor: Lazy
    file: str
    offset: int
    """Of its first element in the file."""


Chunk = dict[str, _Part]
"""Weights of one chunk of the model on one rank, by our names, layers counted in the chunk."""


def files(folder: Path) -> dict[tuple[int, int], Path]:
    """Return the files of a folder by (tensor-parallel rank, pipeline stage)."""
    found = {}
    for path in folder.glob("mp_rank_*/*.pt"):
        place = _PLACE.match(path.parent.name)
        if path.name in _FILES and place is not None:
            found[int(place.group(1)), int(place.group(2) or 0)] = path
    return found


def read_index(folder: Path) -> Index:
    """Return the index of a folder.

    Raises:
        CheckpointError: a file is missing or damaged, or ranks do not fit each other.
    """
    found = files(folder)
    ranks, stages = (1 + max(place[n] for place in found) for n in (0, 1))
    missing = [(t, p) for t in range(ranks) for p in range(stages) if (t, p) not in found]
    if missing:
        raise CheckpointError(
            f"{folder} lacks the file of tensor-parallel rank {missing[0][0]}, pipeline stage "
            f"{missing[0][1]}"
        )
    index = Index(format=NAME)
    chunks: dict[tuple[int, int, int], Chunk] = {}
    state: dict[str, Any] = {}
    for (rank, stage), path in sorted(found.items()):
        name = str(path.relative_to(folder))
        index.files[name] = path.stat().st_size
        with open_file(path) as archive:
            held = _dict(archive.value, path)
            for number, model in enumerate(_models(held, path)):
                chunks[number, stage, rank] = _chunk(model, archive, name, index.blocks)
            if (rank, stage) == (0, 0):
                state = _state(archive, held)
    _check(folder, state)
    tied = not common.arguments(state).get("untie_embeddings_and_output_weights", True)
    _join(index, chunks, ranks, tied=tied and stages > 1)
    why = "its optimizer's states are in the order of the program that wrote it"
    index.facts = common.facts(state, has_states=False)
    index.facts["parts"]["why"] = why
    common.mark_padding(index)
    return index


def _dict(value: Any, path: Path) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{path} holds a {type(value).__name__} instead of a dict")
    return value


def _models(held: Mapping[str, Any], path: Path) -> list[Mapping[str, Any]]:
    if "model" in held:
        return [_dict(held["model"], path)]
    models = [held[f"model{n}"] for n in range(len(held)) if f"model{n}" in held]
    if not models:
        raise CheckpointError(f"{path} holds no model")
    return models


def _state(archive: Archive, held: Mapping[str, Any]) -> dict[str, Any]:
    kept = ("args", "iteration", "checkpoint_version", "num_floating_point_operations_so_far")
    scheduler = held.get("opt_param_scheduler") or held.get("lr_scheduler") or {}
    small = {key: archive.small(held[key]) for key in kept if key in held}
    return {**small, "opt_param_scheduler": archive.small(scheduler)}


def _check(folder: Path, state: Mapping[str, Any]) -> None:
    version = float(state.get("checkpoint_version") or 0)
    if version < 2:
        raise CheckpointError(
            f"{folder} has version {version:g}, whose queries, keys and values lie in another "
            "order; load and save it with a Megatron-LM of version 2 or later"
        )
    if int(common.arguments(state).get("expert_model_parallel_size") or 1) > 1:
        raise CheckpointError(f"{folder}: experts in the format {NAME} cannot be read")


def _chunk(model: Mapping[str, Any], archive: Archive, file: str, blocks: list[Block]) -> Chunk:
    known = {block.offset for block in blocks if block.file == file}
    chunk: Chunk = {}
    for key, tensor in _flat(model):
        if not isinstance(tensor, Lazy) or not names.is_weight(key):
            continue
        if not tensor.is_contiguous:
            raise CheckpointError(f"{key} in {file} is not stored row-major")
        stored = archive.place(tensor)
        if stored.offset not in known:
            known.add(stored.offset)
            blocks.append(Block(key, file, stored.offset, stored.size, stored.crc32))
        offset = stored.offset + tensor.start * archive.itemsize(tensor)
        chunk[names.to_ours(_renamed(key))] = _Part(tensor, file, offset)
    return chunk


def _flat(model: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in model.items():
        name = f"{prefix}{key}"
        pairs += _flat(value, f"{name}.") if isinstance(value, Mapping) else [(name, value)]
    return pairs


def _renamed(key: str) -> str:
    key = re.sub(r"^(module\.)+", "", key)
    if key.startswith("word_embeddings_for_head."):
        return key.replace("word_embeddings_for_head", "output_layer")
    if key.startswith(_OLD):
        for pattern, name in _OLD_NAMES:
            key = re.sub(pattern, name, key)
    return key


def _join(
    index: Index, chunks: Mapping[tuple[int, int, int], Chunk], ranks: int, *, tied: bool
) -> None:
    """Add every weight of the whole model to ``index``."""
    first = 0
    for number, stage in sorted({place[:2] for place in chunks}):
        parts = [chunks[number, stage, rank] for rank in range(ranks)]
        layers = 0
        for name in parts[0]:
            match = _LAYER.match(name)
            whole = name
            if match is not None:
                layers = max(layers, int(match.group(1)) + 1)
                whole = f"decoder.layers.{first + int(match.group(1))}.{name[match.end() :]}"
            if tied and name == "output_layer.weight":
                continue  # the last stage's copy of the embedding
            index.tensors[f"model.{whole}"] = _joined(name, parts)
        first += layers


def _joined(name: str, parts: list[Chunk]) -> StoredTensor:
    if any(name not in part for part in parts):
        raise CheckpointError(f"{name} is not on every tensor-parallel rank")
    here = [part[name] for part in parts]
    shape, dtype = here[0].tensor.shape, here[0].tensor.dtype
    if any((part.tensor.shape, part.tensor.dtype) != (shape, dtype) for part in here):
        raise CheckpointError(f"tensor-parallel ranks have other shapes or types of {name}")
    if _BY_COLUMNS.search(name):
        whole = (shape[0], shape[1] * len(here))
        boxes = [
            StoredBox(((0, shape[0]), (n * shape[1], (n + 1) * shape[1])), p.file, p.offset, None)
            for n, p in enumerate(here)
        ]
        return StoredTensor(dtype, whole, boxes)
    if not _BY_ROWS.search(name):
        return StoredTensor(dtype, shape, [_box(here[0], 0, shape, 0)])
    halves = 2 if _is_gated(name, parts[0]) else 1
    rows = shape[0] // halves
    boxes = [
        _box(part, half * rows, (rows, *shape[1:]), (half * len(here) + n) * rows)
        for n, part in enumerate(here)
        for half in range(halves)
    ]
    return StoredTensor(dtype, (shape[0] * len(here), *shape[1:]), boxes)


def _box(part: _Part, row: int, shape: tuple[int, ...], first: int) -> StoredBox:
    """Return rows of a rank's part, from ``row`` on, as rows of the whole from ``first`` on."""
    width = DTYPES[part.tensor.dtype].itemsize
    for size in shape[1:]:
        width *= size
    box = whole_box(shape)
    if shape:
        box = ((first, first + shape[0]), *box[1:])
    return StoredBox(box, part.file, part.offset + row * width, None)


def _is_gated(name: str, chunk: Chunk) -> bool:
    """Return whether the first matrix of an MLP has a gate: it is twice as wide as the second."""
    match = re.match(r"^(.*linear_fc)1\.(weight|bias)$", name)
    if match is None:
        return False
    second = chunk.get(f"{match.group(1)}2.weight")
    return second is not None and chunk[name].tensor.shape[0] == 2 * second.tensor.shape[1]
