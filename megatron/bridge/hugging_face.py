"""A model of the transformers library as one of ours, and back.

`Import` opens a folder of theirs, `Export` takes our weights. Both know, before a byte moves, that
each tensor on either side has its partner: ours are those that the model itself would make, so a
mapping that forgot one could not pass. Values are moved in boxes, in the dtype that they have.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from megatron.bridge.copies import Plan
from megatron.bridge.family import Family, choose_by_config, choose_by_settings
from megatron.bridge.files import Weights, open_weights
from megatron.bridge.gpt2 import GPT2
from megatron.bridge.llama import Llama
from megatron.bridge.mixtral import Mixtral
from megatron.bridge.settings import Settings, read_json
from megatron.bridge.t5 import T5
from megatron.core import sharding
from megatron.core.dist_checkpointing.boxes import slabs, whole_box
from megatron.core.dist_checkpointing.format import CHUNK
from megatron.core.dist_checkpointing.stream import ReadSlab, Shape
from megatron.core.mesh import Mesh
from megatron.core.models.gpt import GPTModel
from megatron.core.models.t5 import T5Model
from megatron.core.sharding import Box
from megatron.core.transformer.config import TransformerConfig
from megatron.core.utils import UserError

FAMILIES: Sequence[Family] = (GPT2(), Llama(), Mixtral(), T5())
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
"""Settings that pass through a conversion and back."""
WEIGHT_DTYPES = ("float64", "float32", "float16", "bfloat16")


def our_tensors(config: TransformerConfig, rows: int) -> dict[str, tuple[int, ...]]:
    """Return the logical tensors of a model by name, without making their values."""
    kind = T5Model if config.has_two_stacks else GPTModel
    model = kind(config, Mesh.serial(torch.device("meta")), vocab_size=rows)
    records = map(sharding.of, model.parameters())
    return {record.name: record.shape for record in records}


class Import:
    """A folder of theirs, open to be read as tensors of ours; use it in a ``with`` block.

    Args:
        folder: holds config.json and weights.

    Raises:
        UserError: a setting cannot be expressed, or a tensor has no partner, or another shape.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "config.json"
        settings = Settings(read_json(path), str(path))
        self.family = choose_by_settings(FAMILIES, settings.values, str(path))
        self.rows: int = settings.need("vocab_size", int)
        values = self.family.from_theirs(settings)
        settings.finish()
        self.config = TransformerConfig.resolve(**values)
        self.token_ids = {
            name: settings.values[name]
            for name in TOKEN_IDS
            if settings.values.get(name) is not None
        }
        self._weights: Weights = open_weights(folder)
        try:
            self._stored = self._names(folder)
            self._check_dtypes(folder)
            self._plan = Plan(
                self.family.copies(self.config, self.rows),
                {name: self._weights.tensors[there] for name, there in self._stored.items()},
                our_tensors(self.config, self.rows),
                (str(folder), "the model that it would become"),
            )
        except BaseException:
            self._weights.close()
            raise
        self.tensors = {
            name: Shape(self._plan.dtype(name), shape) for name, shape in self._plan.targets.items()
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._weights.close()

    def read(self, name: str, box: Box) -> Tensor:
        """Return a box of a tensor of ours, in the dtype that `tensors` says."""
        return self._plan.read(name, box, self.tensors[name].dtype, self._theirs)

    def _theirs(self, name: str, box: Box) -> Tensor:
        return self._weights.read(self._stored[name], box)

    def _names(self, folder: Path) -> dict[str, str]:
        """Return the stored name of each tensor by its present one.

        Raises:
            UserError: two are one tensor, or a tied model has a head of its own.
        """
        family, found = self.family, dict[str, str]()
        for stored in self._weights.tensors:
            name = family.canonical(stored)
            if name is None:
                continue
            if name in found:
                raise UserError(f"{folder}: {found[name]} and {stored} are one tensor, {name}")
            found[name] = stored
        vectors = found.get(family.token_vectors)
        for name in family.same_vectors:
            if name not in found or vectors is None:
                continue
            stored = found.pop(name)
            if not self._equal(stored, vectors):
                raise UserError(f"{folder}: {stored} is not {vectors}, which {name} always is")
        self._settle_head(found, folder)
        return found

    def _settle_head(self, found: dict[str, str], folder: Path) -> None:
        """Decide whether the head is the embedding, which is then taken out of ``found``.

        Raises:
            UserError: the settings say otherwise than the weights.
        """
        family, vectors = self.family, found.get(self.family.token_vectors)
        untied = self.config.untie_embeddings_and_output_weights
        if untied and family.head not in found:
            raise UserError(
                f"{folder} has no {family.head}, but config.json says tie_word_embeddings: false; "
                f"if its head is the embedding, say {family.says_tied} there, else the weights are "
                "not whole"
            )
        if not untied and family.head in found and vectors is not None:
            if self._equal(found[family.head], vectors):
                del found[family.head]
            elif family.own_head_wins:
                self.config = replace(self.config, untie_embeddings_and_output_weights=True)
            else:
                raise UserError(
                    f"{folder}: {found[family.head]} is not {vectors}, but config.json ties them; "
                    "say tie_word_embeddings: false there to keep both"
                )

    def _check_dtypes(self, folder: Path) -> None:
        """Refuse numbers that are no weights by themselves, such as quantized ones."""
        strange = [
            f"{name} ({self._weights.tensors[name].dtype})"
            for name in self._stored.values()
            if self._weights.tensors[name].dtype not in WEIGHT_DTYPES
        ]
        if strange:
            raise UserError(
                f"{len(strange)} tensor(s) of {folder} are not of {', '.join(WEIGHT_DTYPES)}, as "
                f"weights are: {', '.join(strange[:3])}{' ...' if len(strange) > 3 else ''}; "
                "quantized weights cannot be converted"
            )

    def _equal(self, one: str, other: str) -> bool:
        """Return whether two stored tensors hold the same."""
        ours, theirs = self._weights.tensors[one], self._weights.tensors[other]
        return ours == theirs and all(
            torch.equal(self._weights.read(one, box), self._weights.read(other, box))
            for box in slabs(whole_box(ours.shape), ours.itemsize, CHUNK)
        )


@dataclass(frozen=True)
class Exported:
    """Settings and tensors of theirs, made of ours."""

    settings: Mapping[str, Any]
    tensors: Mapping[str, Shape]
    read: ReadSlab
    left_out: Sequence[str]
    """Settings of ours for training that theirs cannot express, as on a command line."""


def export(
    config: TransformerConfig,
    rows: int,
    weights: Mapping[str, Shape],
    read: ReadSlab,
    *,
    dtype: str | None = None,
    token_ids: Mapping[str, Any] | None = None,
) -> Exported:
    """Return a model of ours as one of theirs.

    Args:
        config: the architecture.
        rows: of the vocabulary, without padding.
        weights: of the model, by logical name.
        read: gives a box of one.
        dtype: of all results; absent, each keeps its own.
        token_ids: further settings, of `TOKEN_IDS`.

    Raises:
        UserError: no family of theirs can express the model, or a weight is missing or left over.
    """
    family = choose_by_config(FAMILIES, config)
    there = [copy.reversed() for copy in family.copies(config, rows)]
    shapes: dict[str, tuple[int, ...]] = {}
    for copy in there:
        reach = tuple(stop for _, stop in copy.target_box)
        known = shapes.get(copy.target, reach)
        shapes[copy.target] = tuple(map(max, known, reach))
    expected = our_tensors(config, rows)
    plan = Plan(there, weights, shapes, ("the checkpoint", "the model of theirs"))
    assert expected.keys() == plan.sources.keys(), "the model has other weights than the mapping"
    tensors = {name: Shape(dtype or plan.dtype(name), shape) for name, shape in shapes.items()}

    def read_theirs(name: str, box: Box) -> Tensor:
        return plan.read(name, box, tensors[name].dtype, read)

    settings = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": rows,
        **family.to_theirs(config),
        "torch_dtype": main_dtype(tensors),
        **(token_ids or {}),
    }
    return Exported(settings, tensors, read_theirs, family.left_out(config))


def main_dtype(tensors: Mapping[str, Shape]) -> str:
    """Return the dtype of most bytes."""
    sizes: dict[str, int] = {}
    for tensor in tensors.values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.bytes
    return max(sizes, key=lambda name: sizes[name])
