"""GPT: a decoder-only transformer (Radford et al., 2019) and its descendants.

    x = embed(tokens)                    learned positions here, if any
    for each layer:
        x = x + attention(norm(x))       rotary positions, biases or windows here
        x = x + mlp(norm(x))
    loss or logits = head(norm(x))       the head's matrix is the embedding's, unless untied

Norm, activation, position scheme, grouping of key heads and the rest are choices of
`TransformerConfig`. Under pipeline parallelism a rank builds only what its `Stage` owns: a later
stage takes the hidden states of the one before, and an earlier one gives its own. Layers of
multi-token prediction (`mtp`) stand behind the head's norm, on the last stage.

Shapes: B batch, S positions of this context-parallel rank (in `x_SBH` of this rank, sequence
parallelism counted), H hidden, K depths of multi-token prediction.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megatron.core import sharding
from megatron.core.kernels.attention import Packing
from megatron.core.mesh import Mesh
from megatron.core.models.language_model import LanguageEmbedding, LanguageHead, Tie
from megatron.core.models.mtp import Ahead, MultiTokenPrediction
from megatron.core.pipeline_parallel.stages import Stage
from megatron.core.rng import DropoutKey
from megatron.core.tensor_parallel.embedding import VocabularyRows
from megatron.core.transformer.backends import choose_backends
from megatron.core.transformer.block import TransformerBlock
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.context import Context, KeyValueCache
from megatron.core.transformer.layer import Surroundings
from megatron.core.transformer.moe.balanced import Balance
from megatron.core.transformer.plan import layer_plan
from megatron.core.transformer.position import rotary_tables
from megatron.core.transformer.saving import Saving


class GPTModel(nn.Module):
    """Decoder-only language model; parameters are named and described, not yet initialised.

    Call `megatron.core.rng.initialize(model, seed)` for initial values that no layout changes.

    Args:
        config: the architecture.
        mesh: axes and device.
        vocab_size: true rows of the vocabulary.
        padded_vocab_size: rows with padding, a multiple of the tensor-parallel size.
        dtype: of weights and activations.
        stage: what this part of the model owns; everything when absent.
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
        self.config, self.mesh, self.vocab_size = config, mesh, vocab_size
        depths = config.mtp.depths
        self.stage = stage or Stage(range(config.num_layers), num_mtp_layers=depths)
        assert self.stage.num_mtp_layers == (depths if self.stage.is_last else 0), self.stage
        backends = choose_backends(config, mesh.device, dtype)
        self.sequence_parallel = sequence_parallel and mesh.tp.size > 1
        self.saving = Saving(config.recompute, config.offload, mesh)
        around = Surroundings(
            config, mesh, dtype, backends, self.saving, self.sequence_parallel, context_kinds
        )
        self.backends, self.residual_dtype = backends, around.residual_dtype
        rows = VocabularyRows(vocab_size, padded_vocab_size or vocab_size, mesh)
        tied = not config.untie_embeddings_and_output_weights
        whole = self.stage.is_first and self.stage.is_last
        ends_apart = not whole and not self.stage.other_end_is_here
        self.embedding: LanguageEmbedding | None = None
        if self.stage.is_first or self.stage.num_mtp_layers:
            copied = ends_apart and (tied or depths > 0)
            self.embedding = LanguageEmbedding(rows, around, tied=copied)
        layers = self.stage.layers
        plans = layer_plan(config)[layers.start : layers.stop]
        self.decoder = TransformerBlock(plans, self.stage.is_last, around)
        self.output_layer: LanguageHead | None = None
        if self.stage.is_last:
            here = self.embedding is not None or not ends_apart
            tie: Tie = "no" if not tied else "here" if here else "apart"
            self.output_layer = self.head(rows, around, tie)
            if tied and self.embedding is not None:
                self.output_layer.weight = self.embedding.word_embeddings.weight
        self.mtp: MultiTokenPrediction | None = None
        if self.stage.num_mtp_layers:
            self.mtp = MultiTokenPrediction(depths, around)
        self.rotary = rotary_tables(config, mesh, dtype)
        self.balance: Balance | None = None
        """Of the microbatch that comes next, for routers of experts; absent, all tokens count and
        auxiliary losses do not."""
        sharding.name_parameters(self)

    def forward(
        self,
        tokens_BS: Tensor | None,
        labels_BS: Tensor | None = None,
        *,
        x_SBH: Tensor | None = None,
        position_ids_BS: Tensor | None = None,
        packing: Packing | None = None,
        dropout: DropoutKey | None = None,
        cache: KeyValueCache | None = None,
        ahead: Ahead | None = None,
    ) -> Tensor:
        """Return every token's loss ``[B, S]`` or, without labels, logits ``[B, S, vocab_size]``.

        With layers of multi-token prediction losses are ``[1 + K, B, S]``: the model's own, then
        those of each depth. Logits are the model's own alone. A stage that is not the last returns
        its hidden states ``[S, B, H]`` instead.

        Args:
            tokens_BS: token ids, int64; only the first stage looks at them.
            labels_BS: the token that follows each one, int64; only the last stage looks at them.
            x_SBH: what the stage before returned, of `residual_dtype`; on the first stage None.
            position_ids_BS: positions, int64, where they are not 0 .. S-1: of packed documents or,
                with a cache, where these tokens stand among the cached ones.
            packing: documents that attend only within themselves. Their bounds, int32 and 1-D, are
                those of whole samples, on every context-parallel rank. No other mask is taken:
                attention is causal, and which losses count is the caller's matter.
            dropout: key of the dropout masks; absent switches dropout off.
            cache: keys and values of earlier tokens, and room for these.
            ahead: what the depths of multi-token prediction see; needed with labels.
        """
        if self.stage.is_first:
            assert self.embedding is not None
            assert tokens_BS is not None and x_SBH is None, "the first stage takes tokens"
            length = tokens_BS.shape[1]
            x_SBH = self.embedding(tokens_BS, position_ids_BS, dropout)
        else:
            assert x_SBH is not None, "a later stage takes hidden states"
            length = x_SBH.shape[0] * (self.mesh.tp.size if self.sequence_parallel else 1)
        rotary = self.rotary(length, position_ids_BS) if self.rotary else None
        queries = position_ids_BS if cache is not None else None
        tokens_SB = None if tokens_BS is None else tokens_BS.t()
        valid_BS = None if self.balance is None else self.balance.valid_BS
        valid_SB = None if valid_BS is None else valid_BS.t() > 0
        context = Context(
            rotary, packing, dropout, cache, queries, self.balance, valid_SB, tokens_SB
        )
        with self.saving.forward(rotary or ()):
            return self._through(x_SBH, labels_BS, context, ahead)

    def _through(
        self, x_SBH: Tensor, labels_BS: Tensor | None, context: Context, ahead: Ahead | None
    ) -> Tensor:
        """Return what the stage makes of its hidden states."""
        x_SBH = self.decoder(x_SBH, context)
        if self.output_layer is None:
            return x_SBH
        losses_BS: Tensor = self.output_layer(x_SBH, labels_BS)
        if labels_BS is None or self.mtp is None:
            return losses_BS
        assert ahead is not None and self.embedding is not None, "look_ahead() gives what is needed"
        states = self.mtp(x_SBH, ahead, self.embedding, context)
        labels = ahead.labels_BSK.unbind(-1)
        further = map(self.output_layer, states, labels)
        return torch.stack([losses_BS, *further])


def build_stages(
    config: TransformerConfig,
    mesh: Mesh,
    stages: Sequence[Stage],
    *,
    kind: type[GPTModel] = GPTModel,
    **settings: Any,
) -> list[GPTModel]:
    """Return this rank's parts of a GPT, one for each of its stages.

    Where both ends are on this rank and tied, they share one parameter; layers of multi-token
    prediction share the embedding.

    Args:
        config: the architecture.
        mesh: axes and device.
        stages: of this rank, in order of its chunks.
        kind: the model's class.
        settings: further arguments of it.
    """
    chunks = [kind(config, mesh, stage=stage, **settings) for stage in stages]
    if stages[0].is_first and stages[-1].is_last:
        first, last = chunks[0].embedding, chunks[-1].output_layer
        assert first is not None and last is not None
        if not config.untie_embeddings_and_output_weights:
            last.weight = first.word_embeddings.weight
        if chunks[-1].mtp is not None:
            chunks[-1].embedding = first
    return chunks
