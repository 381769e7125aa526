"""What all language models here are: layers of some kind between an embedding and a head.

A model is built in parts, one for each stage of a pipeline. The first one embeds tokens, the last
one has the head, which multiplies by the embedding's matrix unless it is untied: by the same
parameter where one rank has both ends, else by a copy, whose gradients are summed over the ends.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import nn

from megatron.core import sharding
from megatron.core.mesh import Mesh
from megatron.core.models.language_model import LanguageEmbedding, LanguageHead, Tie
from megatron.core.pipeline_parallel.stages import Stage
from megatron.core.tensor_parallel.embedding import VocabularyRows
from megatron.core.transformer.backends import choose_backends
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.layer import Surroundings
from megatron.core.transformer.position import rotary_tables
from megatron.core.transformer.saving import Saving


class LanguageModel(nn.Module):
    """A stage's part of a model; parameters are named and described, not yet initialised.

    Call `megatron.core.rng.initialize(model, seed)` for initial values that no layout changes.

    Args:
        config: the architecture.
        mesh: axes and device.
        vocab_size: true rows of the vocabulary.
        padded_vocab_size: rows with padding, a multiple of the tensor-parallel size.
        dtype: of weights and activations.
        stage: what this part of the model owns, of all layers; everything when absent.
        sequence_parallel: split activations along the sequence between tensor-parallel regions.
        context_kinds: how attention over a sequence's ranks communicates (`context_parallel`): one
            kind for all layers, or one for each.
    """

    head: ClassVar[type[LanguageHead]] = LanguageHead

    def __init__(
        self,
        config: TransformerConfig,
        mesh: Mesh,
        *,
        vocab_size: int,
        padded_vocab_size: int | None = None,
        dtype: torch.dtype = torch.float32,
        stage: Stage | None = None,
        sequence_parallel: bool = False,
        context_kinds: tuple[str, ...] = ("p2p",),
    ) -> None:
        super().__init__()
        self.config, self.mesh, self.vocab_size, self.dtype = config, mesh, vocab_size, dtype
        depths = config.mtp.depths
        self.stage = stage or Stage(range(config.all_layers), num_mtp_layers=depths)
        assert self.stage.num_mtp_layers == (depths if self.stage.is_last else 0), self.stage
        self.backends = choose_backends(config, mesh.device, dtype, mesh.etp.size)
        self.sequence_parallel = sequence_parallel and mesh.tp.size > 1
        self.saving = Saving(config.recompute, config.offload, mesh)
        around = Surroundings(
            *(config, mesh, dtype, self.backends, self.saving),
            *(self.sequence_parallel, context_kinds),
        )
        self.residual_dtype = around.residual_dtype
        rows = VocabularyRows(vocab_size, padded_vocab_size or vocab_size, mesh)
        whole = self.stage.is_first and self.stage.is_last
        ends_apart = not whole and not self.stage.other_end_is_here
        # Modules are made in this order, which is that of their parameters in buffers.
        self.embedding: LanguageEmbedding | None = None
        if self.stage.is_first or self.stage.num_mtp_layers:
            copied = ends_apart and (self.tied or depths > 0)
            self.embedding = LanguageEmbedding(rows, around, tied=copied)
        self._make_layers(around)
        self.output_layer: LanguageHead | None = None
        if self.stage.is_last:
            here = self.embedding is not None or not ends_apart
            tie: Tie = "no" if not self.tied else "here" if here else "apart"
            self.output_layer = self.head(rows, around, tie)
            if self.tied and self.embedding is not None:
                self.output_layer.weight = self.embedding.word_embeddings.weight
        self._make_behind(around)
        self.rotary = rotary_tables(config, mesh, dtype)
        sharding.name_parameters(self)

    @property
    def tied(self) -> bool:
        """Whether embedding and head have one matrix."""
        return not self.config.untie_embeddings_and_output_weights

    def _make_layers(self, around: Surroundings) -> None:
        """Make what stands between embedding and head."""
        raise NotImplementedError

    def _make_behind(self, around: Surroundings) -> None:
        """Make what stands behind the head, if anything does."""

    def join(self, first: Self) -> None:
        """Put parameters that the model has once, and the rank's first stage holds, in place."""
        if first.embedding is not None and self.output_layer is not None and self.tied:
            self.output_layer.weight = first.embedding.word_embeddings.weight


Part = TypeVar("Part", bound=LanguageModel)


def build_parts(
    kind: type[Part],
    config: TransformerConfig,
    mesh: Mesh,
    stages: Sequence[Stage],
    **settings: Any,
) -> list[Part]:
    """Return this rank's parts of a model, one for each of its stages.

    What the model has once they share, where several are on this rank.

    Args:
        kind: the model's class.
        config: the architecture.
        mesh: axes and device.
        stages: of this rank, in order of its chunks.
        settings: further arguments of the class.
    """
    parts = [kind(config, mesh, stage=stage, **settings) for stage in stages]
    for part in parts[1:]:
        part.join(parts[0])
    return parts
