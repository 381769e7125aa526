"""T5: an encoder and a decoder, which attends to what the encoder made (Raffel et al., 2020).

    e = embed(encoder tokens)            learned positions here, if any
    for each layer of the encoder:
        e = e + attention(norm(e))       both ways; rotary positions or relative biases here
        e = e + mlp(norm(e))
    e = norm(e)
    d = embed(decoder tokens)            the same matrix
    for each layer of the decoder:
        d = d + attention(norm(d))       to earlier tokens: padding, at the end, needs no mask
        d = d + cross_attention(norm(d), e)
        d = d + mlp(norm(d))
    loss or logits = head(norm(d))       the head's matrix is the embedding's, unless untied

Layers are numbered through: the encoder's, then the decoder's. A pipeline may be cut anywhere. The
first stage embeds both texts and the last has the head, so that the vocabulary is at the ends, as
a decoder's alone; what goes from stage to stage is one tensor, the encoder's positions and then the
decoder's. Stages of the encoder hand the decoder's embedding on, those of the decoder the encoder's
output; its gradient comes back by the same way, summed over all layers that read it.

Shapes: B batch, S and T positions of encoder and decoder on this context-parallel rank, H hidden,
X = S + T; in hidden states S and T are this rank's, sequence parallelism counted.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from megatron.core.mesh import Mesh
from megatron.core.models.base import LanguageModel, build_parts
from megatron.core.models.language_model import LanguageHead, Tie
from megatron.core.pipeline_parallel.stages import Stage
from megatron.core.rng import DropoutKey
from megatron.core.tensor_parallel.embedding import VocabularyRows
from megatron.core.transformer.block import TransformerBlock
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.context import Context, Encoded
from megatron.core.transformer.init import inner_init
from megatron.core.transformer.layer import Surroundings
from megatron.core.transformer.plan import decoder_plan, encoder_plan
from megatron.core.transformer.relative import RelativePositions
from megatron.core.utils import divide


class T5Head(LanguageHead):
    """A head whose logits have biases where linear layers have."""

    def __init__(self, rows: VocabularyRows, around: Surroundings, tied: Tie = "no") -> None:
        super().__init__(rows, around, tied, bias=around.config.add_bias_linear)


class T5Model(LanguageModel):
    """An encoder and a decoder, or a stage's part of both; the config has two stacks."""

    head = T5Head

    def _make_layers(self, around: Surroundings) -> None:
        assert self.config.has_two_stacks, "an encoder-decoder has layers of two stacks"
        here, first = self.stage.layers, self.config.num_layers
        encoder = [plan for plan in encoder_plan(self.config) if plan.number in here]
        decoder = [plan for plan in decoder_plan(self.config) if plan.number in here]
        # All ranks of a pipeline hold both, so that they have the same sums over it.
        self.encoder_relative_pos_emb: RelativePositions | None = None
        self.decoder_relative_pos_emb: RelativePositions | None = None
        if self.config.position.position_embedding_type == "relative":
            self.encoder_relative_pos_emb = self._relative(around, bidirectional=True)
            self.decoder_relative_pos_emb = self._relative(around, bidirectional=False)
        self.encoder: TransformerBlock | None = None
        if encoder:
            self.encoder = TransformerBlock(encoder, first - 1 in here, around)
        self.decoder: TransformerBlock | None = None
        if decoder or self.stage.is_last:
            self.decoder = TransformerBlock(decoder, self.stage.is_last, around)

    def _relative(self, around: Surroundings, *, bidirectional: bool) -> RelativePositions:
        config, heads = around.config, around.config.attention.num_attention_heads
        shape = (config.position.relative_attention_num_buckets, heads)
        return RelativePositions(
            config.position,
            heads,
            inner_init(config, shape),
            around.mesh,
            around.dtype,
            bidirectional=bidirectional,
        )

    def join(self, first: Self) -> None:
        """Share the token vectors, and the learned biases, which all stages hold."""
        super().join(first)
        self.encoder_relative_pos_emb = first.encoder_relative_pos_emb
        self.decoder_relative_pos_emb = first.decoder_relative_pos_emb

    def forward(
        self,
        encoder_tokens_BS: Tensor | None,
        decoder_tokens_BT: Tensor | None,
        labels_BT: Tensor | None = None,
        *,
        encoder_valid_BS: Tensor,
        x_XBH: Tensor | None = None,
        dropout: DropoutKey | None = None,
    ) -> Tensor:
        """Return every token's loss ``[B, T]`` or, without labels, logits ``[B, T, vocab_size]``.

        A stage that is not the last returns its hidden states ``[X, B, H]`` instead.

        Args:
            encoder_tokens_BS: token ids, int64; only the first stage looks at them.
            decoder_tokens_BT: the same of the decoder. Its padding stands at the end: attention is
                causal, so that no token sees it, and which losses count is the caller's matter.
            labels_BT: what each of the decoder's tokens is to say, int64; for the last stage.
            encoder_valid_BS: which of the encoder's positions are no padding, bool, of whole
                samples on every context-parallel rank. No attention looks at the others.
            x_XBH: what the stage before returned, of `residual_dtype`; on the first stage None.
            dropout: key of the dropout masks; absent switches dropout off.
        """
        if self.stage.is_first:
            assert self.embedding is not None and x_XBH is None, "the first stage takes tokens"
            assert encoder_tokens_BS is not None and decoder_tokens_BT is not None
            x_SBH = self.embedding(encoder_tokens_BS, None, dropout)
            x_TBH = self.embedding(decoder_tokens_BT, None, dropout, "decoder_embedding")
        else:
            assert x_XBH is not None, "a later stage takes hidden states"
            here = divide(encoder_valid_BS.shape[1], self._shares)
            x_SBH, x_TBH = x_XBH.tensor_split([here])
        if self.encoder is not None:
            context = replace(
                self._context(x_SBH, self.encoder_relative_pos_emb, dropout),
                valid_BT=encoder_valid_BS,
            )
            with self.saving.forward(context.rotary or ()):
                x_SBH = self.encoder(x_SBH, context).to(self.residual_dtype)
        if self.decoder is not None:
            context = replace(
                self._context(x_TBH, self.decoder_relative_pos_emb, dropout),
                encoded=Encoded(x_SBH.to(self.dtype), encoder_valid_BS),
            )
            with self.saving.forward(context.rotary or ()):
                x_TBH = self.decoder(x_TBH, context)
        if self.output_layer is None:
            return torch.cat((x_SBH, x_TBH))
        out: Tensor = self.output_layer(x_TBH, labels_BT)
        return out

    @property
    def _shares(self) -> int:
        """Over how many ranks the hidden states of a sample are cut."""
        return self.mesh.cp.size * (self.mesh.tp.size if self.sequence_parallel else 1)

    def _context(
        self, x_SBH: Tensor, relative: RelativePositions | None, dropout: DropoutKey | None
    ) -> Context:
        """Return what goes by positions in a stack's text, of which a rank holds ``x_SBH``."""
        length = x_SBH.shape[0] * self._shares
        rotary = None
        if self.rotary is not None:
            rotary = self.rotary(divide(length, self.mesh.cp.size), None)
        return Context(
            rotary=rotary,
            dropout=dropout,
            bias_1nST=None if relative is None else relative(length),
        )


def build_stages(
    config: TransformerConfig, mesh: Mesh, stages: Sequence[Stage], **settings: Any
) -> list[T5Model]:
    """Return this rank's parts of a T5, one for each stage; see `base.build_parts`."""
    return build_parts(T5Model, config, mesh, stages, **settings)
