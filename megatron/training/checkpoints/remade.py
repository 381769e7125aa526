"""What a tool makes of a checkpoint: which tensors, in which dtype, and what is said of them.

A checkpoint that was copied or converted is a run's like any other. Its settings are those of the
model, never those of the layout or the batches that happened to write it.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.core.config import as_json, resolve, specs
from megatron.core.context_parallel.config import ContextParallelConfig
from megatron.core.dist_checkpointing.boxes import whole_box
from megatron.core.dist_checkpointing.format import StoredTensor
from megatron.core.dist_checkpointing.interface import Reader, TensorFacts
from megatron.core.dist_checkpointing.plan import Piece
from megatron.core.dist_checkpointing.stream import Shape
from megatron.core.grid import ParallelConfig
from megatron.core.pipeline_parallel.config import PipelineConfig
from megatron.core.precision.config import PrecisionConfig
from megatron.core.sharding import Box, box_shape
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.config import TokenizerConfig
from megatron.core.tokenizers.vocabulary import resolve_vocabulary
from megatron.core.transformer.config import TransformerConfig
from megatron.core.utils import UserError
from megatron.training.checkpoints.contents import MASTERS, OPTIMIZER, RANDOM, WEIGHTS
from megatron.training.state import TrainState

PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
"""torch's names of the dtypes that weights may be given."""

# How a run was spread and fed; a run that goes on has its own.
_LAYOUT = frozenset(
    (
        *specs(ParallelConfig),
        *specs(PipelineConfig),
        *specs(ContextParallelConfig),
        *"micro_batch_size global_batch_size rampup_batch_size step_batch_size_schedule "
        "decrease_batch_size_if_needed world_size data_parallel_size padded_vocab_size "
        "make_vocab_size_divisible_by".split(),
    )
)


EMBEDDING = f"{WEIGHTS}embedding.word_embeddings.weight"


class View:
    """A checkpoint as it shall be written: a choice of its tensors, weights in another dtype.

    It is a `Reader` of its own. A weight in another dtype is made of its finer copy, where the
    checkpoint has one.

    Args:
        source: the open checkpoint.
        facts: what is to be said of the result.
        dtype: of the weights; absent, as stored.
        with_optimizer: keep its states and finer weights.
        weights_only: keep nothing but weights.
    """

    def __init__(
        self,
        source: Reader,
        facts: Mapping[str, Any],
        *,
        dtype: str | None = None,
        with_optimizer: bool = True,
        weights_only: bool = False,
    ) -> None:
        self._source, self.facts = source, facts
        self.folder, self.format, self.hash = source.folder, source.format, source.hash
        self.files = source.files
        self.tensors: dict[str, StoredTensor] = {}
        self._taken: dict[str, str] = {}
        rows = facts.get("vocabulary_rows")
        for key, stored in sorted(source.tensors.items()):
            if key.startswith(OPTIMIZER) and not (with_optimizer and not weights_only):
                continue
            if key.startswith(RANDOM) and weights_only:
                continue
            tensor = StoredTensor(stored.dtype, true_shape(stored, rows, key))
            taken = key
            if dtype is not None and key.startswith(WEIGHTS):
                tensor.dtype = dtype
                finer = MASTERS + key.removeprefix(WEIGHTS)
                if finer in source.tensors and dtype != stored.dtype:
                    taken = finer
            self.tensors[key], self._taken[key] = tensor, taken

    @property
    def shapes(self) -> dict[str, Shape]:
        """Return what there is to write."""
        return {key: Shape(tensor.dtype, tensor.shape) for key, tensor in self.tensors.items()}

    def read(self, key: str, box: Box | None = None) -> Tensor:
        """Return a tensor, or one box of it, in the dtype that `tensors` says."""
        tensor = self.tensors[key]
        wanted = box if box is not None else whole_box(tensor.shape)
        out = torch.empty(box_shape(wanted), dtype=tensor.torch_dtype)
        self.fill(key, Piece(wanted, out))
        return out

    def fill(self, key: str, piece: Piece) -> None:
        """Read one box of a tensor into a view."""
        self._source.fill(self._taken[key], piece)

    def damages(self, files: Iterable[str] | None = None) -> list[str]:
        """Return what is wrong with the source."""
        return self._source.damages(files)

    def close(self) -> None:
        """Leave the source to whoever opened it."""


def true_shape(stored: TensorFacts, rows: int | None, key: str) -> tuple[int, ...]:
    """Return the shape of a tensor without rows that only pad the vocabulary.

    Raises:
        UserError: there may be such rows, and ``rows``, how many are true, is not known or cannot
            be right.
    """
    if stored.padded_to == 1:
        return stored.shape
    there = stored.shape[0]
    if rows is None:
        raise UserError(
            f"{key} has {there} rows, of which some may only pad the vocabulary, and the "
            "checkpoint does not say how many are true; give --vocab-size, or --tokenizer-type and "
            "its files"
        )
    if not 0 <= there - rows < stored.padded_to:
        raise UserError(
            f"{key} has {there} rows, padded to a multiple of {stored.padded_to}, which cannot "
            f"come from a vocabulary of {rows}; give --vocab-size, or the right tokenizer"
        )
    return (rows, *stored.shape[1:])


def with_vocabulary(
    facts: Mapping[str, Any], source: Reader, given: TokenizerConfig
) -> dict[str, Any]:
    """Return the facts with the true rows of the vocabulary, where they have to be found out.

    They are those of a tokenizer that flags name, or ``--vocab-size``, or what the facts say; else
    the tokenizer's that the checkpoint names, if its embedding may be padded.

    Raises:
        UserError: a tokenizer cannot be loaded.
    """
    stored = source.tensors.get(EMBEDDING)
    config = given
    if given.tokenizer_type is None:
        if given.vocab_size is not None:
            return {**facts, "vocabulary_rows": given.vocab_size}
        if stored is None or stored.padded_to == 1 or facts.get("vocabulary_rows") is not None:
            return dict(facts)
        config = part_of(TokenizerConfig, facts)
        if config.tokenizer_type is None:
            return dict(facts)
    tokenizer = build_tokenizer(config)
    rows = resolve_vocabulary(config, tokenizer.vocab_size).rows
    if stored is not None and stored.padded_to == 1:
        rows = stored.shape[0]
        config = fitted(config, tokenizer, rows)
    settings = {name: as_json(value) for name, value in config.flatten().items()}
    return {
        **facts,
        "config": {**facts.get("config", {}), **settings},
        "tokenizer": tokenizer.fingerprint(),
        "vocabulary": tokenizer.vocab_size,
        "vocabulary_rows": rows,
    }


def part_of(cls: Any, facts: Mapping[str, Any]) -> Any:
    """Return one config out of the flat settings of a checkpoint."""
    stored = facts.get("config", {})
    values = {
        name: spec.convert(stored[name]) for name, spec in specs(cls).items() if name in stored
    }
    return resolve(cls, values)[0]


def copied(facts: Mapping[str, Any], *, dtype: str | None, with_optimizer: bool) -> dict[str, Any]:
    """Return what a copy says of itself."""
    kept = {name: value for name, value in facts.items() if name != "published"}
    if not with_optimizer:
        kept["parts"] = {**kept.get("parts", {}), "optimizer": False}
        kept["optimizer"] = {}
    if dtype is not None:
        kept["config"] = {**kept.get("config", {}), **precision_of(dtype)}
    return kept


def without_layout(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts without what belongs to a layout or to its batches."""
    config = {name: value for name, value in facts.get("config", {}).items() if name not in _LAYOUT}
    return {**facts, "config": config}


def precision_of(dtype: str) -> dict[str, bool]:
    """Return the settings under which a run holds its weights in a dtype."""
    return {flag: PRECISIONS[flag] == dtype for flag in ("bf16", "fp16", "fp64")}


def imported(
    model: TransformerConfig,
    rows: int,
    dtype: str,
    tokenizer_config: TokenizerConfig,
    tokenizer: Tokenizer | None,
) -> dict[str, Any]:
    """Return the facts of weights that no run of ours has made, at iteration 0.

    Args:
        model: the architecture.
        rows: of the vocabulary.
        dtype: of the weights; one that no run has is left to the run that loads them.
        tokenizer_config: where the tokenizer is; only kept with a tokenizer.
        tokenizer: the loaded one, if there is one.
    """
    config = model.flatten()
    if dtype in PRECISIONS.values():
        config |= PrecisionConfig.resolve(**precision_of(dtype)).flatten()
    facts: dict[str, Any] = {
        "iteration": 0,
        "progress": TrainState().to_json(),
        "parts": {"optimizer": False, "random": False},
        "optimizer": {},
        "schedule": None,
        "vocabulary_rows": rows,
    }
    if tokenizer is not None:
        config |= fitted(tokenizer_config, tokenizer, rows).flatten()
        facts |= {"tokenizer": tokenizer.fingerprint(), "vocabulary": tokenizer.vocab_size}
    facts["config"] = {name: as_json(value) for name, value in config.items()}
    return without_layout(facts)


def fitted(config: TokenizerConfig, tokenizer: Tokenizer, rows: int) -> TokenizerConfig:
    """Return the settings of a tokenizer under which a model has this many rows.

    Raises:
        UserError: there are none: the tokenizer has ids for which the model has no row.
    """
    null = config.tokenizer_type == "NullTokenizer"
    ids = tokenizer.vocab_size
    if ids > rows or (null and ids != rows):
        hint = f"; --vocab-size {rows - 1} would fit" if null else ", so it is another one's"
        raise UserError(
            f"--tokenizer-type {config.tokenizer_type} has {ids} ids, the model {rows} rows{hint}"
        )
    if null or ids == rows:
        return config
    return dataclasses.replace(config, vocab_size=rows)
