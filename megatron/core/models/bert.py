"""BERT: an encoder alone (Devlin et al., 2019), with norms before the blocks as Megatron-LM has it.

    x = embed(tokens) + positions + types
    for each layer, as GPT's, but that a token attends to all of its sample:
        x = x + attention(norm(x));   x = x + mlp(norm(x))
    h = norm(x)
    words = head(norm(gelu(W h + b))) + c       the head's matrix is the embedding's, unless untied
    order = V tanh(U h[first] + u) + v          whether the sample's two parts are swapped

Stages, the stack of layers and names of parameters are GPT's, so that all that knows these knows an
encoder too: its stack is called ``decoder``. Padding attends to padding alone (`Packing`), and
nothing reads what comes of it.

Shapes: B batch, S positions of this context-parallel rank (in ``x_SBH`` of this rank, sequence
parallelism counted), H hidden.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core import sharding
from megatron.core.kernels.attention import Packing
from megatron.core.kernels.dtypes import accumulate_dtype
from megatron.core.mesh import Mesh
from megatron.core.models.base import build_parts
from megatron.core.models.gpt import GPTModel
from megatron.core.models.language_model import LanguageHead, Tie
from megatron.core.pipeline_parallel.stages import Stage
from megatron.core.rng import DropoutKey
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.embedding import VocabularyRows
from megatron.core.tensor_parallel.layers import WholeLinear
from megatron.core.transformer.bert_config import TOKEN_TYPES
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.context import Context
from megatron.core.transformer.init import inner_init
from megatron.core.transformer.layer import Surroundings, build_norm


class Said(NamedTuple):
    """What the last stage says of a microbatch."""

    words: Tensor
    """The loss of every token, ``[B, S]``, or logits, ``[B, S, vocab_size]``."""
    order: Tensor | None
    """The loss of every sample, ``[B]``, or logits, ``[B, 2]``; None without such a head. It is of
    the rank that holds the samples' first tokens, and means nothing on the others along ``cp``."""


class BertHead(LanguageHead):
    """Transforms hidden states before it says words; says the order of a sample's parts."""

    def __init__(self, rows: VocabularyRows, around: Surroundings, tied: Tie = "no") -> None:
        super().__init__(rows, around, tied, bias=True)
        config, mesh, dtype = around.config, around.mesh, around.dtype
        square = (config.hidden_size, config.hidden_size)
        init = inner_init(config, square)
        self.dense = WholeLinear(square, init, mesh, dtype, self.gathers, bias=True)
        self.layernorm = build_norm(around)
        self.pooler: WholeLinear | None = None
        if config.bert.sentence_order_head:
            # All ranks along tp see the same token here: their gradients are whole.
            self.pooler = WholeLinear(square, init, mesh, dtype, bias=True)
            wide = (TOKEN_TYPES, config.hidden_size)
            self.order = WholeLinear(wide, inner_init(config, wide), mesh, dtype, bias=True)
            weight = self.order.weight
            sharding.attach(weight, replace(sharding.of(weight), matrix=False))

    def forward(  # type: ignore[override]
        self, x_SBH: Tensor, labels_BS: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return losses of words (logits, without labels), and logits ``[B, 2]`` of the order."""
        order_B2 = None if self.pooler is None else self._order(self.pooler, x_SBH)
        transformed_SBH = self.layernorm(F.gelu(self.dense(x_SBH)))
        words = super().forward(transformed_SBH, labels_BS)
        return words, order_B2

    def _order(self, pooler: WholeLinear, x_SBH: Tensor) -> Tensor:
        first_1BH = x_SBH[:1]
        if self.gathers:  # each rank's first position, of which that of the first rank is meant
            first_1BH = mappings.join(first_1BH, self.axis)[:1]
        logits_1B2: Tensor = self.order(torch.tanh(pooler(first_1BH)))
        return logits_1B2[0].to(accumulate_dtype(logits_1B2.dtype))


class BertModel(GPTModel):
    """An encoder alone, or a stage's part of one."""

    head = BertHead

    def forward(  # type: ignore[override]
        self,
        tokens_BS: Tensor | None,
        labels_BS: Tensor | None = None,
        order_B: Tensor | None = None,
        *,
        x_SBH: Tensor | None = None,
        token_types_BS: Tensor | None = None,
        packing: Packing | None = None,
        dropout: DropoutKey | None = None,
    ) -> Said | Tensor:
        """Return what is said of masked words and order: losses or, without labels, logits.

        A stage that is not the last returns its hidden states ``[S, B, H]`` instead.

        Args:
            tokens_BS: token ids, int64; only the first stage looks at them.
            labels_BS: the token that stood at each masked place, int64, and any id elsewhere; only
                the last stage looks at them.
            order_B: 1 where a sample's parts are swapped, else 0, int64; negative where nobody
                knows, and the loss counts for nothing.
            x_SBH: what the stage before returned, of `residual_dtype`; on the first stage None.
            token_types_BS: the type of each token, int64, where tokens have types.
            packing: tokens and padding of each sample, as two documents.
            dropout: key of the dropout masks; absent switches dropout off.
        """
        x_SBH, rotary = self._enter(tokens_BS, x_SBH, None, dropout, token_types_BS)
        with self.saving.forward(rotary or ()):
            x_SBH = self.decoder(x_SBH, Context(rotary, packing, dropout))
            if self.output_layer is None:
                return x_SBH
            words, order = self.output_layer(x_SBH, labels_BS)
        if order is not None and order_B is not None:
            order = F.cross_entropy(order, order_B.clamp(min=0), reduction="none")
        return Said(words, order)


def build_bert_stages(
    config: TransformerConfig, mesh: Mesh, stages: Sequence[Stage], **settings: Any
) -> list[BertModel]:
    """Return this rank's parts of a BERT, one for each stage; see `base.build_parts`."""
    return build_parts(BertModel, config, mesh, stages, **settings)
