"""GPT: a decoder-only transformer (Radford et al., 2019) and its descendants.

    x = embed(tokens)                    learned positions here, if any
    for each layer:
        x = x + attention(norm(x))       rotary positions, biases or windows here
        x = x + mlp(norm(x))
    loss or logits = head(norm(x))       the head's matrix is the embedding's, unless untied

Norm, activation, position scheme, grouping of key heads and the rest are choices of
`TransformerConfig`. Under pipeline parallelism a rank builds only what its `Stage` owns.

Shapes: B batch, S sequence, H hidden.
"""

import torch
from torch import Tensor, nn

from megatron.core import sharding
from megatron.core.kernels.attention import Packing
from megatron.core.mesh import Mesh
from megatron.core.models.language_model import LanguageEmbedding, LanguageHead
from megatron.core.pipeline_parallel.stages import Stage
from megatron.core.rng import DropoutKey
from megatron.core.tensor_parallel.embedding import VocabularyRows
from megatron.core.transformer.backends import choose_backends
from megatron.core.transformer.block import TransformerBlock
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.context import Context, KeyValueCache
from megatron.core.transformer.layer import Surroundings
from megatron.core.transformer.position import RotaryTables
from megatron.core.utils import UserError


class GPTModel(nn.Module):
    """Decoder-only language model; parameters are named and described, not yet initialised.

    Call `megatron.core.rng.initialize(model, seed)` for initial values that no layout changes.

    Args:
        config: the architecture.
        mesh: axes and device.
        vocab_size: true rows of the vocabulary.
        padded_vocab_size: rows with padding, a multiple of the tensor-parallel size.
        dtype: of weights and activations.
        stage: what this rank owns; everything when absent.
        sequence_parallel: split activations along the sequence between tensor-parallel regions.
    """

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
    ) -> None:
        super().__init__()
        self.config, self.mesh, self.vocab_size = config, mesh, vocab_size
        self.stage = stage or Stage(range(config.num_layers))
        backends = choose_backends(config, mesh.device, dtype)
        around = Surroundings(config, mesh, dtype, backends, sequence_parallel and mesh.tp.size > 1)
        self.backends = backends
        rows = VocabularyRows(vocab_size, padded_vocab_size or vocab_size, mesh)
        self.embedding = LanguageEmbedding(rows, around) if self.stage.is_first else None
        self.decoder = TransformerBlock(self.stage.layers, self.stage.is_last, around)
        self.output_layer = None
        if self.stage.is_last:
            self.output_layer = LanguageHead(rows, around, self._tied_weight())
        self.rotary: RotaryTables | None = None
        if config.position.is_rotary:
            head_size = config.attention.kv_channels
            self.rotary = RotaryTables(config.position, head_size, mesh.device, dtype)
        sharding.name_parameters(self)

    def _tied_weight(self) -> nn.Parameter | None:
        if self.config.untie_embeddings_and_output_weights:
            return None
        if self.embedding is None:
            raise UserError(
                "tied embeddings over several pipeline stages are not there yet; give "
                "--untie-embeddings-and-output-weights or --pipeline-model-parallel-size 1"
            )
        return self.embedding.word_embeddings.weight

    def forward(
        self,
        tokens_BS: Tensor,
        labels_BS: Tensor | None = None,
        *,
        position_ids_BS: Tensor | None = None,
        packing: Packing | None = None,
        dropout: DropoutKey | None = None,
        cache: KeyValueCache | None = None,
        query_positions_BS: Tensor | None = None,
    ) -> Tensor:
        """Return every token's loss ``[B, S]`` or, without labels, logits ``[B, S, vocab_size]``.

        Args:
            tokens_BS: token ids.
            labels_BS: the token that follows each one.
            position_ids_BS: positions where they are not 0 .. S-1 (packed documents, decoding).
            packing: documents that attend only within themselves.
            dropout: key of the dropout masks; absent switches dropout off.
            cache: keys and values of earlier tokens, and room for these.
            query_positions_BS: where these tokens stand among the cached ones.
        """
        assert self.embedding is not None, "a later stage takes activations, not tokens"
        assert self.output_layer is not None, "an earlier stage has no head"
        positions = query_positions_BS if query_positions_BS is not None else position_ids_BS
        rotary = self.rotary(tokens_BS.shape[1], positions) if self.rotary else None
        context = Context(rotary, packing, dropout, cache, query_positions_BS)
        x_SBH = self.embedding(tokens_BS, positions, dropout)
        x_SBH = self.decoder(x_SBH, context)
        if labels_BS is None:
            return self.output_layer.logits(x_SBH)
        return self.output_layer.losses(x_SBH, labels_BS)
