"""Cross-attention: queries of a decoder's tokens, keys and values of what an encoder made.

The fused key-value matrix is Megatron's: for each head its key, then its value. Heads are cut over
the tensor-parallel axis; queries are projected apart, since they are made of other tokens.

Shapes: S queries and T keys of this rank, B batch, H hidden, n heads on this rank, D channels of a
head.
"""

from dataclasses import replace

import torch
from torch import Tensor

from megatron.core import sharding
from megatron.core.kernels.attention import Extras
from megatron.core.mesh import Mesh
from megatron.core.sharding import Sharding
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import Attention, attention_rule, softmax_scale
from megatron.core.transformer.backends import Backends
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.context import Context, Encoded
from megatron.core.transformer.init import inner_init, residual_init
from megatron.core.transformer.saving import Saving
from megatron.core.utils import divide


class CrossAttention(Attention):
    """What each of a decoder's tokens makes of all of an encoder's, padding left out."""

    place = "cross_attention"

    def __init__(
        self,
        config: TransformerConfig,
        layer: int,
        mesh: Mesh,
        dtype: torch.dtype,
        backends: Backends,
        saving: Saving,
        *,
        sequence_parallel: bool = False,
        context_kind: str = "p2p",
    ) -> None:
        super().__init__(
            config,
            layer,
            mesh,
            dtype,
            backends,
            saving,
            rule=replace(attention_rule(config, layer, softmax_scale(config)), causal=False),
            context_kind=context_kind,
        )
        attention, hidden = config.attention, config.hidden_size
        self.head_size = attention.kv_channels
        width = attention.num_attention_heads * self.head_size
        share, cut = divide(width, mesh.tp.size), (mesh.tp.coordinate, mesh.tp.size)
        bias, parallel = config.add_bias_linear, sequence_parallel
        query_bias = bias or attention.add_qkv_bias
        query = sharding.split((width, hidden), inner_init(config, (width, hidden)), 0, *cut)
        self.linear_q = ColumnParallelLinear(
            query, share, mesh, dtype, bias=query_bias, sequence_parallel=parallel
        )
        self.linear_kv = ColumnParallelLinear(
            kv_record(config, mesh),
            2 * share,
            mesh,
            dtype,
            bias=query_bias,
            sequence_parallel=parallel,
        )
        back = (hidden, width)
        self.linear_proj = RowParallelLinear(
            sharding.split(back, residual_init(config, back), 1, *cut),
            share,
            mesh,
            dtype,
            bias=bias,
            sequence_parallel=parallel,
        )

    def forward(self, x_SBH: Tensor, context: Context) -> Tensor:
        encoded = context.encoded
        assert encoded is not None, "a decoder with an encoder gets what that gave"
        # Where its queries stand is for self-attention alone, and so is the cache.
        context = replace(context, cache=None, query_positions_BS=None)
        q_SBnD = self.linear_q(x_SBH).unflatten(2, (-1, self.head_size))
        k_TBnD, v_TBnD = self._keys_and_values(encoded).chunk(2, 3)
        y_SBH: Tensor = self.linear_proj(self._attended(q_SBnD, k_TBnD, v_TBnD, context))
        return y_SBH

    def _keys_and_values(self, encoded: Encoded) -> Tensor:
        """Return ``[T, B, n, 2 D]``, made once for all tokens where it is kept."""
        made = None if encoded.kept is None else encoded.kept.get(self.layer)
        if made is None:
            made = self.linear_kv(encoded.x_TBH).unflatten(2, (-1, 2 * self.head_size))
            if encoded.kept is not None:
                encoded.kept[self.layer] = made
        return made

    def _extras(self, context: Context) -> Extras:
        assert context.encoded is not None
        extras = super()._extras(context)
        return replace(extras, valid_BT=context.encoded.valid_BT, bias=None)


def kv_record(config: TransformerConfig, mesh: Mesh) -> Sharding:
    """Return the record of this rank's share of the fused key-value matrix."""
    attention = config.attention
    shape = (2 * attention.num_attention_heads * attention.kv_channels, config.hidden_size)
    record = sharding.split(shape, inner_init(config, shape), 0, mesh.tp.coordinate, mesh.tp.size)
    fused = (("key", attention.kv_channels), ("value", attention.kv_channels))
    return replace(record, fused=fused)
