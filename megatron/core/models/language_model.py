"""The two ends of a language model: tokens in, logits or losses out.

Shapes: B batch, S sequence, H hidden, V padded vocabulary (v this rank's share), P a piece of S.
"""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from megatron.core import comm
from megatron.core.kernels import dropout as masks
from megatron.core.kernels.dtypes import accumulate_dtype
from megatron.core.kernels.reused import Reused
from megatron.core.recompute import recompute
from megatron.core.rng import DropoutKey
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.cross_entropy import cross_entropy
from megatron.core.tensor_parallel.embedding import (
    VocabParallelEmbedding,
    VocabularyRows,
    position_record,
)
from megatron.core.tensor_parallel.layers import bias_record, linear, make_parameter
from megatron.core.transformer.init import embedding_init
from megatron.core.transformer.layer import Surroundings
from megatron.core.transformer.plan import loss_pieces
from megatron.core.transformer.position import LearnedPositions

Tie = Literal["no", "apart", "here"]
TOKEN_VECTORS = "embedding.word_embeddings.weight"
"""Logical name of the matrix that an embedding holds, and a head that is tied to it."""


class LanguageEmbedding(nn.Module):
    """Token vectors, plus those of positions and types where the model has them, then dropout.

    The result has the dtype of the residual stream.

    ``tied`` says that the stage at the other end of the model, on another rank, holds a second copy
    of the token vectors.
    """

    def __init__(self, rows: VocabularyRows, around: Surroundings, tied: bool = False) -> None:
        super().__init__()
        config, init = around.config, embedding_init(around.config)
        self.word_embeddings = VocabParallelEmbedding(
            rows,
            config.hidden_size,
            init,
            around.mesh,
            around.dtype,
            sequence_parallel=around.sequence_parallel,
            tied=tied,
        )
        self.position_embeddings: LearnedPositions | None = None
        if config.position.position_embedding_type == "learned_absolute":
            self.position_embeddings = LearnedPositions(
                config.position,
                config.hidden_size,
                init,
                around.mesh,
                around.dtype,
                summed=around.sequence_parallel,
            )
        self.token_type_embeddings: TokenTypes | None = None
        if config.bert.token_types:
            self.token_type_embeddings = TokenTypes(config.bert.token_types, around)
        self.multiplier, self.dtype = config.embedding_multiplier, around.residual_dtype
        self.dropout = config.hidden_dropout
        self.axis, self.sequence_parallel = around.mesh.tp, around.sequence_parallel

    def forward(
        self,
        tokens_BS: Tensor,
        position_ids_BS: Tensor | None,
        dropout: DropoutKey | None,
        token_types_BS: Tensor | None = None,
        place: str = "embedding",
    ) -> Tensor:
        """Return x_SBH; ``place`` tells dropout masks apart where a model embeds twice."""
        x_SBH: Tensor = self.word_embeddings(tokens_BS)
        if self.position_embeddings is not None:
            positions = self.position_embeddings(tokens_BS.shape[1], position_ids_BS)
            if self.sequence_parallel:
                positions = mappings.own_slice(positions, self.axis)
            x_SBH = x_SBH + positions
        if self.token_type_embeddings is not None:
            assert token_types_BS is not None, "tokens of this model have types"
            types_SB = token_types_BS.t()
            if self.sequence_parallel:
                types_SB = mappings.own_slice(types_SB, self.axis)
            x_SBH = x_SBH + self.token_type_embeddings(types_SB)
        if self.multiplier != 1.0:
            x_SBH = x_SBH * self.multiplier
        x_SBH = x_SBH.to(self.dtype)
        if self.dropout and dropout is not None:
            split = (self.axis.coordinate,) if self.sequence_parallel else ()
            x_SBH = masks.dropout(x_SBH, self.dropout, dropout.at(place, *split))
        return x_SBH


class TokenTypes(nn.Module):
    """One learned vector per type of token, which every rank holds whole."""

    def __init__(self, types: int, around: Surroundings) -> None:
        super().__init__()
        shape = (types, around.config.hidden_size)
        record = position_record(*shape, embedding_init(around.config), around.sequence_parallel)
        self.weight = make_parameter(record, shape, around.mesh, around.dtype)

    def forward(self, types_SB: Tensor) -> Tensor:
        return self.weight[types_SB]


class LanguageHead(nn.Module):
    """Logits of the next token, or its loss.

    Args:
        rows: of the vocabulary, on this rank.
        around: what every module is built with.
        tied: the embedding has the same matrix: ``apart``, a copy on another rank, or ``here``,
            where the model puts it in place of an empty `weight`.
        bias: add a number to each token's logit.
    """

    def __init__(
        self,
        rows: VocabularyRows,
        around: Surroundings,
        tied: Tie = "no",
        bias: bool = False,
    ) -> None:
        super().__init__()
        config = around.config
        self.rows, self.axis = rows, around.mesh.tp
        self.multiplier, self.softcap = config.logit_multiplier, config.logit_softcap
        self.gathers = around.sequence_parallel
        self.alone = around.mesh.alone
        self.logits_at_once = config.logits_at_once
        self.loss_kernels = around.backends.cross_entropy
        self.label_smoothing = config.label_smoothing
        self.memory = Reused()
        record = rows.record(config.hidden_size, embedding_init(config))
        if tied == "apart":  # one logical matrix, whose first values and name are the embedding's
            record = replace(record, tied=True, name=TOKEN_VECTORS)
        shape = (0 if tied == "here" else rows.count, config.hidden_size)
        self.weight = make_parameter(record, shape, around.mesh, around.dtype)
        self.bias: nn.Parameter | None = None
        if bias:
            own = bias_record(rows.record(config.hidden_size, embedding_init(config)))
            self.bias = make_parameter(own, (rows.count,), around.mesh, around.dtype)

    def forward(self, x_SBH: Tensor, labels_BS: Tensor | None = None) -> Tensor:
        """Return `losses`, or `logits` without labels."""
        return self.logits(x_SBH) if labels_BS is None else self.losses(x_SBH, labels_BS)

    def local_logits(self, x_SBH: Tensor, memory: Reused | None = None) -> Tensor:
        """Return this rank's share of the logits, ``[S, B, v]``; large ones lie in ``memory``."""
        return self._scaled(linear(x_SBH, self.weight, None, self.axis, self.gathers, memory))

    def _scaled(self, logits_SBv: Tensor) -> Tensor:
        if self.bias is not None:
            # Not by the product, which may give a view: the loss works in the logits' memory.
            logits_SBv = logits_SBv.add_(self.bias)
        if self.multiplier != 1.0:
            logits_SBv = logits_SBv * self.multiplier
        if self.softcap is not None:
            logits_SBv = self.softcap * torch.tanh(logits_SBv / self.softcap)
        return logits_SBv

    def logits(self, x_SBH: Tensor) -> Tensor:
        """Return ``[B, S, vocab_size]`` logits in fp32 or better; for inference."""
        logits_SBv = self.local_logits(x_SBH)
        logits_SBv = logits_SBv.to(accumulate_dtype(logits_SBv.dtype))
        if self.axis.size > 1:
            logits_vSB = comm.all_gather(logits_SBv.movedim(-1, 0).contiguous(), self.axis)
            logits_SBv = logits_vSB.movedim(0, -1)
        return logits_SBv.transpose(0, 1)[..., : self.rows.vocab_size]

    def losses(self, x_SBH: Tensor, labels_BS: Tensor) -> Tensor:
        """Return the loss of every token, ``[B, S]``, in fp32 or better.

        In training labels are smoothed, if they are to be.

        Where there are too many logits for one matrix, only those of a piece of the sequence exist
        at once, in forward and in backward. Backward then makes each piece's logits and losses
        again, and with them the tensor-parallel sums of the losses: these collectives run twice, in
        forward and in backward, so that every rank of the axis must run backward too.

        Args:
            x_SBH: hidden states; with sequence parallelism this rank's share of the positions.
            labels_BS: int64, of all positions, also with sequence parallelism.
        """
        labels_SB = labels_BS.t()
        sequence, samples = labels_SB.shape
        pieces = loss_pieces(sequence, samples, self.rows.count, limit=self.logits_at_once)
        if pieces == 1:
            return self._losses(self.local_logits(x_SBH, self.memory), labels_SB).t()
        # The whole sequence enters here, once, so that a piece needs no collective for its input.
        x_SBH = mappings.enter(x_SBH, self.axis, self.gathers)
        parts = zip(x_SBH.tensor_split(pieces), labels_SB.tensor_split(pieces), strict=True)
        losses = [recompute(self._piece, *part) for part in parts]
        return torch.cat(losses).t()

    def _piece(self, x_PBH: Tensor, labels_PB: Tensor) -> Tensor:
        logits_PBv = self._scaled(linear(x_PBH, self.weight, None, self.alone, False, self.memory))
        return self._losses(logits_PBv, labels_PB)

    def _losses(self, logits_SBv: Tensor, labels_SB: Tensor) -> Tensor:
        smoothing = self.label_smoothing if self.training else 0.0
        return cross_entropy(
            logits_SBv, labels_SB, self.rows, self.axis, smoothing, self.loss_kernels
        )
