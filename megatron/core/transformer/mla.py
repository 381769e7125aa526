"""Multi-latent attention: keys and values of all heads from one small latent per token.

    latent, rotary key = down(x)                  one of each, whatever the number of heads
    keys, values       = up(norm(latent))         of every head
    queries            = up(norm(down(x)))        or straight from x
    key of a head      = [its own channels, the rotary key, rotated]
    query of a head    = [its own channels, its rotary channels, rotated]

(DeepSeek-V2, 2024.) Rotary channels are paired even with odd. Megatron-LM moves the pairs' members
into two halves first; the products of queries and keys, in which the order of channels is lost, are
the same. Rows of the up projections are, for each head, channels without position, then rotary
channels (queries) or the value (keys and values).

Heads are cut over the tensor-parallel axis, and with them the up projections. The down projections
make what all heads need: each rank holds them whole and, with sequence parallelism, applies them to
its own positions, so that their gradients, and those of the latents' norms, are partial there only.
What enters the heads has its gradient summed over the ranks: a latent as the input of an up
projection, the rotary key by itself.

Shapes: S positions, s this rank's share of them under sequence parallelism; B batch, H hidden, L
channels of a latent, n heads of this rank, D channels of a query or key, P of them rotary, E of a
value.
"""

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from megatron.core import sharding
from megatron.core.kernels.rope import yarn_mscale
from megatron.core.mesh import Mesh
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    WholeLinear,
)
from megatron.core.transformer.attention import Attention, attention_rule
from megatron.core.transformer.backends import Backends
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.context import Context
from megatron.core.transformer.init import inner_init, residual_init
from megatron.core.transformer.mla_config import MLAConfig
from megatron.core.transformer.norm import Norm
from megatron.core.transformer.saving import Lender, Runner, Saving


class MultiLatentAttention(Attention):
    """Multi-latent attention of one layer."""

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
        rule = attention_rule(config, layer, attention_scale(config.mla))
        super().__init__(
            config, layer, mesh, dtype, backends, saving, rule=rule, context_kind=context_kind
        )
        self.sizes = config.mla
        self.sequence_parallel = sequence_parallel
        self.rope = backends.rope
        self._make_queries(config, mesh, dtype)
        self._make_keys_and_values(config, mesh, dtype)
        self._make_norms(config, mesh, dtype, backends)
        width = config.attention.num_attention_heads * config.mla.v_head_dim
        self.linear_proj = RowParallelLinear.even(
            width,
            config.hidden_size,
            mesh,
            dtype,
            residual_init(config, (config.hidden_size, width)),
            bias=config.add_bias_linear,
            sequence_parallel=sequence_parallel,
        )
        self.run_down: Runner = saving.runner(self, offloaded="qkv_linear")
        self.lend_up: Lender = saving.lender(self, recomputed="mla_up_proj", offloaded="qkv_linear")
        self.run_proj: Runner = saving.runner(self.linear_proj, offloaded="attn_proj")

    def _make_queries(self, config: TransformerConfig, mesh: Mesh, dtype: torch.dtype) -> None:
        rank, hidden = config.mla.q_lora_rank, config.hidden_size
        rows = config.attention.num_attention_heads * config.mla.query_size
        self.linear_q_proj: ColumnParallelLinear | None = None
        if rank is None:
            self.linear_q_proj = self._up(hidden, rows, config, mesh, dtype)
            return
        self.linear_q_down_proj = self._down(rank, config, mesh, dtype)
        self.linear_q_up_proj = self._up(rank, rows, config, mesh, dtype)

    def _make_keys_and_values(
        self, config: TransformerConfig, mesh: Mesh, dtype: torch.dtype
    ) -> None:
        latent = config.mla
        rows = config.attention.num_attention_heads * (latent.qk_head_dim + latent.v_head_dim)
        self.linear_kv_down_proj = self._down(latent.down_size, config, mesh, dtype)
        self.linear_kv_up_proj = self._up(latent.kv_lora_rank, rows, config, mesh, dtype)

    def _make_norms(
        self, config: TransformerConfig, mesh: Mesh, dtype: torch.dtype, backends: Backends
    ) -> None:
        self.q_layernorm: nn.Module = nn.Identity()
        self.kv_layernorm: nn.Module = nn.Identity()
        if not config.attention.qk_layernorm:
            return
        summed = ("tp",) if self.sequence_parallel else ()
        rank = config.mla.q_lora_rank
        if rank is not None:
            self.q_layernorm = norm = Norm(rank, config.norm, mesh, dtype, backends, summed)
            sharding.attach(norm.weight, replace(sharding.of(norm.weight), qk_norm=True))
        rank = config.mla.kv_lora_rank
        self.kv_layernorm = Norm(rank, config.norm, mesh, dtype, backends, summed)

    def _up(
        self, inputs: int, rows: int, config: TransformerConfig, mesh: Mesh, dtype: torch.dtype
    ) -> ColumnParallelLinear:
        return ColumnParallelLinear.even(
            inputs,
            rows,
            mesh,
            dtype,
            inner_init(config, (rows, inputs)),
            bias=False,
            sequence_parallel=self.sequence_parallel,
        )

    def _down(
        self, rows: int, config: TransformerConfig, mesh: Mesh, dtype: torch.dtype
    ) -> WholeLinear:
        shape = (rows, config.hidden_size)
        return WholeLinear(shape, inner_init(config, shape), mesh, dtype, self.sequence_parallel)

    def forward(self, x_sBH: Tensor, context: Context) -> Tensor:
        assert context.rotary is not None, "the model computes rotary tables"
        latents = self.run_down(self._latents, x_sBH)
        with self.lend_up(partial(self._heads, rotary=context.rotary), *latents) as heads:
            q_SBnD, k_SBnD, v_SBnE = heads
            mixed_SBX = self._attended(q_SBnD, k_SBnD, v_SBnE, context)
        y_sBH: Tensor = self.run_proj(self.linear_proj, mixed_SBX)
        return y_sBH

    def _latents(self, x_sBH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what queries are made of, what keys and values are, and the rotary key."""
        q_sBL = x_sBH
        if self.linear_q_proj is None:
            q_sBL = self.q_layernorm(self.linear_q_down_proj(x_sBH))
        mixed = self.linear_kv_down_proj(x_sBH)
        ranks = (self.sizes.kv_lora_rank, self.sizes.qk_pos_emb_head_dim)
        latent_sBL, turning_sBP = mixed.split(ranks, -1)
        # Copies: else whoever keeps the one or the other keeps both.
        return q_sBL, self.kv_layernorm(latent_sBL).contiguous(), turning_sBP.contiguous()

    def _heads(
        self,
        q_sBL: Tensor,
        latent_sBL: Tensor,
        turning_sBP: Tensor,
        rotary: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of this rank's heads."""
        sizes = self.sizes
        up = self.linear_q_up_proj if self.linear_q_proj is None else self.linear_q_proj
        q_SBnD = up(q_sBL).unflatten(2, (self.heads, -1))
        own, turning = q_SBnD.split((sizes.qk_head_dim, sizes.qk_pos_emb_head_dim), -1)
        q_SBnD = torch.cat((own, self.rope(turning, *rotary, True)), -1)
        kv_SBX = self.linear_kv_up_proj(latent_sBL).unflatten(2, (self.heads, -1))
        own, v_SBnE = kv_SBX.split((sizes.qk_head_dim, sizes.v_head_dim), -1)
        turning_SBP = mappings.enter(turning_sBP, self.mesh.tp, self.sequence_parallel)
        turned_SB1P = self.rope(turning_SBP.unsqueeze(2), *rotary, True)
        k_SBnD = torch.cat((own, turned_SB1P.expand(-1, -1, self.heads, -1)), -1)
        return q_SBnD, k_SBnD, v_SBnE


def attention_scale(latent: MLAConfig) -> float:
    """Return the factor on products of queries and keys, YaRN's temperature among it."""
    temperature = yarn_mscale(latent.rotary_scaling_factor, latent.mscale_all_dim)
    return temperature**2 / math.sqrt(latent.query_size)
