"""Self-attention: project, rotate, attend, project back.

`Attention` is the part that does not depend on how queries, keys and values are made.

The fused query-key-value matrix is Megatron's: for each query group its query heads, then its key
head, then its value head. Groups are cut over the tensor-parallel axis, so a rank's rows are
contiguous. With fewer groups than ranks, neighbours (`Mesh.kv_replica`) cut the query heads of a
group and each hold its key and value heads, whose gradients are then summed over them.

Shapes: S queries, T keys, B batch, H hidden, n query heads on this rank, g query groups on this
rank, D channels of a head, E of a value head.
"""

import math
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from megatron.core import rng, sharding
from megatron.core.context_parallel.attention import ContextAxes, context_attention
from megatron.core.kernels.attention import Extras, Rule
from megatron.core.mesh import Mesh
from megatron.core.sharding import Box, Init, Region, Sharding
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    make_parameter,
)
from megatron.core.transformer.backends import Backends
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.context import Context
from megatron.core.transformer.init import inner_init, residual_init
from megatron.core.transformer.norm import Norm
from megatron.core.transformer.position import alibi_slopes
from megatron.core.transformer.saving import Runner, Saving
from megatron.core.utils import divide


class Attention(nn.Module):
    """Queries of this rank's heads against keys and values, whatever these are made from."""

    place: ClassVar[str] = "attention"
    """Tells its dropout apart from that of its layer's others."""

    def __init__(
        self,
        config: TransformerConfig,
        layer: int,
        mesh: Mesh,
        dtype: torch.dtype,
        backends: Backends,
        saving: Saving,
        *,
        rule: Rule,
        context_kind: str,
    ) -> None:
        super().__init__()
        attention = config.attention
        self.layer, self.mesh = layer, mesh
        self.heads = divide(attention.num_attention_heads, mesh.tp.size)
        self.dropout = attention.attention_dropout
        axes = ContextAxes(mesh.cp, mesh.cp_inner, mesh.cp_outer)
        self.attend = context_attention(context_kind, axes, backends.attention)
        self.rule = rule
        self._make_softmax(config, mesh, dtype)
        self.run_mix: Runner = saving.runner(self, recomputed="core_attn", offloaded="core_attn")

    def _make_softmax(self, config: TransformerConfig, mesh: Mesh, dtype: torch.dtype) -> None:
        heads, kind = config.attention.num_attention_heads, config.attention.softmax_type
        start = mesh.tp.coordinate * self.heads
        extras = Extras()
        self.softmax_offset: nn.Parameter | None = None
        if kind == "learnable":
            record = replace(
                sharding.split((heads,), Init(), 0, mesh.tp.coordinate, mesh.tp.size),
                decay=False,
                matrix=False,
            )
            self.softmax_offset = make_parameter(record, (self.heads,), mesh, dtype)
        elif kind == "off-by-one":
            zeros = torch.zeros(self.heads, dtype=dtype, device=mesh.device)
            extras = replace(extras, sink_n=zeros)
        if config.position.position_embedding_type == "alibi":
            slopes = alibi_slopes(heads)[start : start + self.heads].to(mesh.device)
            extras = replace(extras, alibi_slopes_n=slopes)
        self.extras = extras

    def _attended(self, q_SBnD: Tensor, k_SBgD: Tensor, v_SBgE: Tensor, context: Context) -> Tensor:
        """Return `mix` as the run's settings for core attention say."""
        y_SBX: Tensor = self.run_mix(partial(self.mix, context=context), q_SBnD, k_SBgD, v_SBgE)
        return y_SBX

    def mix(self, q_SBnD: Tensor, k_SBgD: Tensor, v_SBgE: Tensor, context: Context) -> Tensor:
        """Return what each query makes of the values it sees, ``[S, B, n * E]``.

        All three have one dtype, which is the result's. What a query sees is made here and never
        given as a matrix: the keys not after it in a causal layer, within the layer's window, no
        padding, and of its own document where the context has a packing, whose bounds are int32
        ``[documents + 1]``, over the flattened tokens of whole samples. With a cache the queries
        stand where ``context.query_positions_BS``, int64, says.
        """
        k_TBgD, v_TBgE = k_SBgD, v_SBgE
        if context.cache is not None:
            k_TBgD, v_TBgE = context.cache.append(self.layer, k_SBgD, v_SBgE)
        y_SBnE = self.attend(q_SBnD, k_TBgD, v_TBgE, self.rule, self._extras(context))
        return y_SBnE.flatten(2)

    def _extras(self, context: Context) -> Extras:
        extras = self.extras
        if self.softmax_offset is not None:
            extras = replace(extras, sink_n=self.softmax_offset)
        seen = {
            "packing": context.packing,
            "query_positions_BS": context.query_positions_BS,
            "valid_BT": context.valid_BT,
            "bias": context.bias_1nST,
        }
        if any(value is not None for value in seen.values()):
            extras = replace(extras, **seen)  # type: ignore[arg-type]
        if self.dropout and context.dropout is not None:
            # Every rank drops its own heads.
            seed = context.dropout.at(f"layers.{self.layer}.{self.place}", self.mesh.tp.coordinate)
            scope = rng.seeded(seed, self.mesh.device)
            extras = replace(extras, dropout_p=self.dropout, dropout_scope=scope)
        return extras


class SelfAttention(Attention):
    """Multi-head or grouped-query attention of one layer."""

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
        attention = config.attention
        super().__init__(
            config,
            layer,
            mesh,
            dtype,
            backends,
            saving,
            rule=attention_rule(config, layer, softmax_scale(config)),
            context_kind=context_kind,
        )
        self.head_size = attention.kv_channels
        self.groups = divide(attention.num_query_groups * mesh.kv_replica.size, mesh.tp.size)
        self.rotates = config.position.layer_rotates(layer)
        self.interleaved = config.position.rotary_interleaved
        self.rope = backends.rope
        self._make_projections(config, mesh, dtype, sequence_parallel)
        self._make_norms(config, mesh, dtype, backends)
        self.run_qkv: Runner = saving.runner(self, offloaded="qkv_linear")
        self.run_proj: Runner = saving.runner(self.linear_proj, offloaded="attn_proj")

    def _make_projections(
        self, config: TransformerConfig, mesh: Mesh, dtype: torch.dtype, sequence_parallel: bool
    ) -> None:
        attention, hidden = config.attention, config.hidden_size
        width = attention.num_attention_heads * self.head_size
        cut = (mesh.tp.coordinate, mesh.tp.size)
        qkv = qkv_record(config, mesh)
        proj = sharding.split((hidden, width), residual_init(config, (hidden, width)), 1, *cut)
        self.linear_qkv = ColumnParallelLinear(
            qkv,
            (self.heads + 2 * self.groups) * self.head_size,
            mesh,
            dtype,
            bias=config.add_bias_linear or attention.add_qkv_bias,
            sequence_parallel=sequence_parallel,
        )
        self.linear_proj = RowParallelLinear(
            proj,
            divide(width, mesh.tp.size),
            mesh,
            dtype,
            bias=config.add_bias_linear,
            sequence_parallel=sequence_parallel,
        )

    def _make_norms(
        self, config: TransformerConfig, mesh: Mesh, dtype: torch.dtype, backends: Backends
    ) -> None:
        self.q_layernorm: nn.Module = nn.Identity()
        self.k_layernorm: nn.Module = nn.Identity()
        if config.attention.qk_layernorm:
            # Every rank normalises its own heads, so the gains' gradients are partial.
            for name in ("q_layernorm", "k_layernorm"):
                norm = Norm(self.head_size, config.norm, mesh, dtype, backends, summed=("tp",))
                record = sharding.of(norm.weight)
                sharding.attach(norm.weight, replace(record, qk_norm=True))
                setattr(self, name, norm)
        elif config.attention.qk_l2_norm:
            self.q_layernorm = self.k_layernorm = _L2Norm(config.norm.norm_epsilon, backends)

    def forward(self, x_SBH: Tensor, context: Context) -> Tensor:
        q_SBnD, k_SBgD, v_SBgD = self.run_qkv(self._heads, x_SBH)
        if self.rotates:
            assert context.rotary is not None, "the model computes rotary tables"
            q_SBnD = self.rope(q_SBnD, *context.rotary, self.interleaved)
            k_SBgD = self.rope(k_SBgD, *context.rotary, self.interleaved)
        mixed_SBX = self._attended(q_SBnD, k_SBgD, v_SBgD, context)
        y_SBH: Tensor = self.run_proj(self.linear_proj, mixed_SBX)
        return y_SBH

    def _heads(self, x_SBH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, normalised but not rotated.

        They are views of one tensor where that is possible.
        """
        mixed = self.linear_qkv(x_SBH).unflatten(2, (self.groups, -1, self.head_size))
        per_group = self.heads // self.groups
        q_SBgpD, k_SBg1D, v_SBg1D = mixed.split((per_group, 1, 1), dim=3)
        q_SBnD, k_SBgD, v_SBgD = q_SBgpD.flatten(2, 3), k_SBg1D.squeeze(3), v_SBg1D.squeeze(3)
        return self.q_layernorm(q_SBnD), self.k_layernorm(k_SBgD), v_SBgD


class _L2Norm(nn.Module):
    """Divide the last dim by its root mean square."""

    def __init__(self, epsilon: float, backends: Backends) -> None:
        super().__init__()
        self.epsilon, self.rms_norm = epsilon, backends.rms_norm

    def forward(self, x: Tensor) -> Tensor:
        return self.rms_norm(x, None, self.epsilon)


def attention_rule(config: TransformerConfig, layer: int, scale: float) -> Rule:
    """Return what a layer's self-attention decides once; scores are scaled by ``scale``."""
    return Rule(
        scale=scale,
        causal=config.layer_is_causal(layer),
        window=config.attention.layer_window(layer),
        softcap=config.attention.attention_softcap,
    )


def softmax_scale(config: TransformerConfig) -> float:
    """Return the factor on products of queries and keys."""
    given = config.attention.softmax_scale
    return 1.0 / math.sqrt(config.attention.kv_channels) if given is None else given


def qkv_record(config: TransformerConfig, mesh: Mesh) -> Sharding:
    """Return the record of this rank's share of the fused query-key-value matrix."""
    attention, hidden = config.attention, config.hidden_size
    size, groups = attention.kv_channels, attention.num_query_groups
    per_group = divide(attention.num_attention_heads, groups)
    rows = (attention.num_attention_heads + 2 * groups) * size
    shape, sharers = (rows, hidden), mesh.kv_replica
    init = inner_init(config, shape)
    fused = (("query", per_group * size), ("key", size), ("value", size))
    if sharers.size == 1:
        record = sharding.split(shape, init, 0, mesh.tp.coordinate, mesh.tp.size)
        return replace(record, fused=fused)
    # This rank's query heads of its group, then the group's key and value head.
    group, share = mesh.tp.coordinate // sharers.size, divide(per_group, sharers.size) * size
    start = group * (per_group + 2) * size
    query, pair = start + sharers.coordinate * share, start + per_group * size
    return Sharding(
        shape,
        (
            Region(_rows(0, share, hidden), _rows(query, query + share, hidden)),
            Region(
                _rows(share, share + 2 * size, hidden),
                _rows(pair, pair + 2 * size, hidden),
                replicated=(sharers.name,),
                summed=(sharers.name,),
            ),
        ),
        init,
        matrix=True,
        fused=fused,
    )


def _rows(start: int, stop: int, columns: int) -> Box:
    return (start, stop), (0, columns)
