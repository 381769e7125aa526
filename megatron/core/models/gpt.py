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
from typing import Any, Self

import torch
from torch import Tensor

from megatron.core.kernels.attention import Packing
from megatron.core.mesh import Mesh
from megatron.core.models.base import LanguageModel, build_parts
from megatron.core.models.mtp import Ahead, MultiTokenPrediction
from megatron.core.pipeline_parallel.stages import Stage
from megatron.core.rng import DropoutKey
from megatron.core.transformer.block import TransformerBlock
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.context import Context, KeyValueCache
from megatron.core.transformer.layer import Surroundings
from megatron.core.transformer.moe.balance import Balance
from megatron.core.transformer.plan import layer_plan


class GPTModel(LanguageModel):
    """A decoder-only language model, or a stage's part of one."""

    def _make_layers(self, around: Surroundings) -> None:
        layers = self.stage.layers
        plans = layer_plan(self.config)[layers.start : layers.stop]
        self.decoder = TransformerBlock(plans, self.stage.is_last, around)

    def _make_behind(self, around: Surroundings) -> None:
        self.mtp: MultiTokenPrediction | None = None
        if self.stage.num_mtp_layers:
            self.mtp = MultiTokenPrediction(self.stage.num_mtp_layers, around)
        self.balance: Balance | None = None
        """Of the microbatch that comes next, for routers of experts; absent, all tokens count and
        auxiliary losses do not."""

    def join(self, first: Self) -> None:
        """Share the token vectors, which layers of multi-token prediction read too."""
        super().join(first)
        if self.mtp is not None and first.embedding is not None:
            self.embedding = first.embedding

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
        x_SBH, rotary = self._enter(tokens_BS, x_SBH, position_ids_BS, dropout)
        queries = position_ids_BS if cache is not None else None
        tokens_SB = None if tokens_BS is None else tokens_BS.t()
        valid_BS = None if self.balance is None else self.balance.valid_BS
        valid_SB = None if valid_BS is None else valid_BS.t() > 0
        context = Context(
            rotary, packing, dropout, cache, queries, self.balance, valid_SB, tokens_SB
        )
        with self.saving.forward(rotary or ()):
            return self._through(x_SBH, labels_BS, context, ahead)

    def _enter(
        self,
        tokens_BS: Tensor | None,
        x_SBH: Tensor | None,
        position_ids_BS: Tensor | None,
        dropout: DropoutKey | None,
        token_types_BS: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Return what the stage's layers take: hidden states, and rotary tables if any turn."""
        if self.stage.is_first:
            assert self.embedding is not None
            assert tokens_BS is not None and x_SBH is None, "the first stage takes tokens"
            length = tokens_BS.shape[1]
            x_SBH = self.embedding(tokens_BS, position_ids_BS, dropout, token_types_BS)
        else:
            assert x_SBH is not None, "a later stage takes hidden states"
            length = x_SBH.shape[0] * (self.mesh.tp.size if self.sequence_parallel else 1)
        return x_SBH, self.rotary(length, position_ids_BS) if self.rotary else None

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
    config: TransformerConfig, mesh: Mesh, stages: Sequence[Stage], **settings: Any
) -> list[GPTModel]:
    """Return this rank's parts of a GPT, one for each stage; see `base.build_parts`."""
    return build_parts(GPTModel, config, mesh, stages, **settings)
