"""Which parameters a rank holds, by name and shape, exactly as the model builds them.

Pure functions without torch; counts, and bytes of weights, gradients and optimizer state, follow.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron.core.grid import key_value_sharers
from megatron.core.optimizer.groups import Traits
from megatron.core.pipeline_parallel.stages import Stage
from megatron.core.transformer.bert_config import TOKEN_TYPES
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.plan import LayerPlan, layer_plan, mtp_layer_plan
from megatron.training.plan import multi_latent

TOKEN_VECTORS = "embedding.word_embeddings.weight"
"""Name of the embedding, and of a head that is tied to it."""
BIASES = "_relative_pos_emb"
"""Ends the names of modules of learned biases by distance."""


@dataclass(frozen=True)
class ParameterShape:
    """One parameter of a rank."""

    name: str
    """Its path in the model."""
    shape: tuple[int, ...]
    kind: str
    """What it belongs to, for sums by kind of layer."""
    summed: tuple[str, ...] = ()
    """Axes that its gradient is summed over, as its `Sharding` says."""
    tied: bool = False
    """A second copy is on the rank that holds the other end of the model."""
    apart: bool = False
    """Another stage of this rank uses it too, so that it lies in a buffer of its own."""
    qk_norm: bool = False
    """Gain of a query or key norm, which --apply-wd-to-qk-layernorm decays."""
    expert: bool = False
    """Its replicas are those of experts."""
    trained: bool = True
    """An optimizer updates it; else it lies in no buffer."""
    vectors: bool = False
    """It has several dims, and is no matrix: biases of several experts, or a single row."""

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def traits(self) -> Traits:
        """Return what the parameter's record says of it to optimizer groups."""
        is_end = self.kind in ("word embedding", "output head") and len(self.shape) > 1
        return Traits(
            # A tied head is named after the embedding.
            name=TOKEN_VECTORS if self.kind == "output head" and self.tied else self.name,
            decay=len(self.shape) > 1 and not self.name.endswith(".bias"),
            matrix=len(self.shape) > 1
            and not (is_end or self.vectors or self.kind == "position embedding"),
            qk_norm=self.qk_norm,
            embedding=is_end,
        )


def stage_parameters(
    model: TransformerConfig,
    padded_rows: int,
    stage: Stage,
    tp: int = 1,
    *,
    sequence_parallel: bool = False,
    expert_ways: tuple[int, int] = (1, 1),
) -> Iterator[ParameterShape]:
    """Yield the parameters that a tensor-parallel rank of a stage holds.

    Args:
        model: the architecture.
        padded_rows: rows of the vocabulary, padding included.
        stage: the layers and ends that the rank owns.
        tp: tensor-parallel ranks.
        sequence_parallel: ranks see a part of the sequence outside of attention and MLP.
        expert_ways: ranks over which experts are spread, and over which each is cut.
    """
    hidden = model.hidden_size
    # Where ranks see different tokens, gradients of what each holds whole are partial.
    parted = ("tp",) if sequence_parallel and tp > 1 else ()
    untied, meet = model.untie_embeddings_and_output_weights, stage.other_end_is_here
    ends_apart = not (meet or (stage.is_first and stage.is_last))
    tied = ends_apart and not untied
    vocabulary = (padded_rows // tp, hidden)
    # Layers of multi-token prediction need the embedding at the model's end too.
    ahead = stage.num_mtp_layers > 0 and not stage.is_first
    if stage.is_first or (ahead and not meet):
        name = "embedding.word_embeddings.weight"
        copied = tied or (ends_apart and model.mtp.depths > 0)
        apart = meet and (not untied or model.mtp.depths > 0)
        yield ParameterShape(name, vocabulary, "word embedding", tied=copied, apart=apart)
    if stage.is_first:
        if model.position.position_embedding_type == "learned_absolute":
            table = (model.position.max_position_embeddings, hidden)
            name = "embedding.position_embeddings.weight"
            yield ParameterShape(name, table, "position embedding", parted)
        if model.bert.token_types:
            types = (model.bert.token_types, hidden)
            name = "embedding.token_type_embeddings.weight"
            yield ParameterShape(name, types, "token types", parted, vectors=True)
    around = _Ranks(tp, parted, *expert_ways)
    yield from _stacks(model, stage, around)
    if stage.is_last:
        if untied or (tied and not ahead):
            yield ParameterShape("output_layer.weight", vocabulary, "output head", tied=tied)
        if model.bert.encoder_alone:
            yield from _words_head(model, vocabulary[0], parted)
        if model.has_two_stacks and model.add_bias_linear:
            yield ParameterShape("output_layer.bias", vocabulary[:1], "output head")
    for depth in range(stage.num_mtp_layers):
        yield from _mtp_layer(model, depth, around)


def _words_head(
    model: TransformerConfig, rows: int, parted: tuple[str, ...]
) -> Iterator[ParameterShape]:
    """Yield what a head of masked words has besides its matrix."""
    name, kind, hidden = "output_layer", "head of masked words", model.hidden_size
    yield ParameterShape(f"{name}.bias", (rows,), kind)
    yield ParameterShape(f"{name}.dense.weight", (hidden, hidden), kind, parted)
    yield ParameterShape(f"{name}.dense.bias", (hidden,), kind, parted)
    yield from _norm(model, f"{name}.layernorm", hidden, parted)
    if not model.bert.sentence_order_head:
        return
    kind = "head of sentence order"
    yield ParameterShape(f"{name}.pooler.weight", (hidden, hidden), kind)
    yield ParameterShape(f"{name}.pooler.bias", (hidden,), kind)
    yield ParameterShape(f"{name}.order.weight", (TOKEN_TYPES, hidden), kind, vectors=True)
    yield ParameterShape(f"{name}.order.bias", (TOKEN_TYPES,), kind)


class _Ranks(NamedTuple):
    """Over how many ranks a layer is cut."""

    tp: int
    parted: tuple[str, ...]
    """Axes along which ranks see other tokens outside of attention and MLP."""
    ep: int
    etp: int


def _stacks(model: TransformerConfig, stage: Stage, ranks: _Ranks) -> Iterator[ParameterShape]:
    """Yield the parameters of a stage's layers, and of the norms at the ends of their stacks."""
    first, plan = model.num_layers if model.has_two_stacks else 0, layer_plan(model)
    if model.position.position_embedding_type == "relative":
        heads = model.attention.num_attention_heads // ranks.tp
        table = (model.position.relative_attention_num_buckets, heads)
        for stack in ("encoder", "decoder"):
            yield ParameterShape(f"{stack}{BIASES}.weight", table, "position embedding", ("pp",))
    for stack, layers, is_end in (
        ("encoder", [n for n in stage.layers if n < first], first - 1 in stage.layers),
        ("decoder", [n for n in stage.layers if n >= first], stage.is_last),
    ):
        for number in layers:
            yield from _layer(model, f"{stack}.layers.{plan[number].name}", plan[number], ranks)
        if is_end:
            yield from _norm(model, f"{stack}.final_layernorm", model.hidden_size, ranks.parted)


def _layer(
    model: TransformerConfig, name: str, plan: LayerPlan, ranks: _Ranks
) -> Iterator[ParameterShape]:
    tp, parted = ranks.tp, ranks.parted
    for sublayer in plan.sublayers:
        yield from _norm(model, f"{name}.{sublayer.norm_name}", model.hidden_size, parted)
        block = f"{name}.{sublayer.block_name}"
        if sublayer.kind == "mlp":
            yield from _mlp(model, block, model.mlp.ffn_hidden_size, tp, parted)
        elif sublayer.kind == "moe":
            yield from _experts(model, block, plan.number, ranks)
        elif sublayer.kind == "multi_latent_attention":
            yield from _latent_attention(model, block, tp, parted)
        elif sublayer.kind == "cross_attention":
            yield from _cross_attention(model, block, tp, parted)
        else:
            yield from _attention(model, block, tp, parted)


def _mtp_layer(model: TransformerConfig, depth: int, ranks: _Ranks) -> Iterator[ParameterShape]:
    parted = ranks.parted
    name, hidden = f"mtp.layers.{depth}", model.hidden_size
    yield from _norm(model, f"{name}.enorm", hidden, parted)
    yield from _norm(model, f"{name}.hnorm", hidden, parted)
    shape = (hidden, 2 * hidden)
    yield ParameterShape(f"{name}.eh_proj.weight", shape, "prediction ahead", parted)
    plan = mtp_layer_plan(model, depth)
    yield from _layer(model, f"{name}.transformer_layer", plan, ranks)
    yield from _norm(model, f"{name}.final_layernorm", hidden, parted)


def _norm(
    model: TransformerConfig, name: str, size: int, summed: tuple[str, ...], kind: str = "norms"
) -> Iterator[ParameterShape]:
    yield ParameterShape(f"{name}.weight", (size,), kind, summed)
    if model.norm.normalization == "LayerNorm":
        yield ParameterShape(f"{name}.bias", (size,), kind, summed)


def _attention(
    model: TransformerConfig, name: str, tp: int, parted: tuple[str, ...]
) -> Iterator[ParameterShape]:
    attention, hidden, kind = model.attention, model.hidden_size, "attention"
    heads, size = attention.num_attention_heads // tp, attention.kv_channels
    # With fewer groups than ranks, a group is repeated on each rank that needs it.
    sharers = key_value_sharers(tp, attention.num_query_groups)
    rows = (heads + 2 * attention.num_query_groups * sharers // tp) * size
    shared = ("kv_replica",) if sharers > 1 else ()
    if attention.softmax_type == "learnable":
        yield ParameterShape(f"{name}.softmax_offset", (heads,), kind)
    yield ParameterShape(f"{name}.linear_qkv.weight", (rows, hidden), kind, shared)
    if model.add_bias_linear or attention.add_qkv_bias:
        yield ParameterShape(f"{name}.linear_qkv.bias", (rows,), kind, shared)
    yield ParameterShape(f"{name}.linear_proj.weight", (hidden, heads * size), kind)
    if model.add_bias_linear:
        yield ParameterShape(f"{name}.linear_proj.bias", (hidden,), kind, parted)
    if attention.qk_layernorm:
        for which in ("q_layernorm", "k_layernorm"):
            # Each rank normalises heads of its own.
            gain, *shift = _norm(model, f"{name}.{which}", size, ("tp",), kind)
            yield from (replace(gain, qk_norm=True), *shift)


def _cross_attention(
    model: TransformerConfig, name: str, tp: int, parted: tuple[str, ...]
) -> Iterator[ParameterShape]:
    attention, hidden, kind = model.attention, model.hidden_size, "cross-attention"
    width = attention.num_attention_heads * attention.kv_channels // tp
    for matrix, rows in (("linear_q", width), ("linear_kv", 2 * width)):
        yield ParameterShape(f"{name}.{matrix}.weight", (rows, hidden), kind)
        if model.add_bias_linear or attention.add_qkv_bias:
            yield ParameterShape(f"{name}.{matrix}.bias", (rows,), kind)
    yield ParameterShape(f"{name}.linear_proj.weight", (hidden, width), kind)
    if model.add_bias_linear:
        yield ParameterShape(f"{name}.linear_proj.bias", (hidden,), kind, parted)


def _latent_attention(
    model: TransformerConfig, name: str, tp: int, parted: tuple[str, ...]
) -> Iterator[ParameterShape]:
    attention, hidden, kind = model.attention, model.hidden_size, "attention"
    heads = attention.num_attention_heads // tp
    if attention.softmax_type == "learnable":
        yield ParameterShape(f"{name}.softmax_offset", (heads,), kind)
    for matrix in multi_latent.projections(model, tp):
        summed = parted if matrix.is_whole else ()
        yield ParameterShape(f"{name}.{matrix.name}.weight", matrix.shape, kind, summed)
    if attention.qk_layernorm:
        for which, rank in multi_latent.latents(model).items():
            gain, *shift = _norm(model, f"{name}.{which}", rank, parted, kind)
            yield from (replace(gain, qk_norm=which == "q_layernorm"), *shift)
    shape = (hidden, heads * model.mla.v_head_dim)
    yield ParameterShape(f"{name}.linear_proj.weight", shape, kind)
    if model.add_bias_linear:
        yield ParameterShape(f"{name}.linear_proj.bias", (hidden,), kind, parted)


def _mlp(
    model: TransformerConfig,
    name: str,
    inner: int,
    tp: int,
    parted: tuple[str, ...],
    kind: str = "mlp",
) -> Iterator[ParameterShape]:
    hidden, inner = model.hidden_size, inner // tp
    wide = inner * (2 if model.mlp.is_gated else 1)
    yield ParameterShape(f"{name}.linear_fc1.weight", (wide, hidden), kind)
    if model.add_bias_linear:
        yield ParameterShape(f"{name}.linear_fc1.bias", (wide,), kind)
    yield ParameterShape(f"{name}.linear_fc2.weight", (hidden, inner), kind)
    if model.add_bias_linear:
        yield ParameterShape(f"{name}.linear_fc2.bias", (hidden,), kind, parted)


def _experts(
    model: TransformerConfig, name: str, layer: int, ranks: _Ranks
) -> Iterator[ParameterShape]:
    """Yield a layer's router, its experts and its shared experts."""
    by_token_id = layer < model.router.moe_n_hash_layers
    moe, hidden, parted = model.moe, model.hidden_size, ranks.parted
    assert moe.num_experts is not None
    # A rank routes tokens of its own, with or without sequence parallelism.
    own = ("tp",) if ranks.tp > 1 else ()
    yield ParameterShape(f"{name}.router.weight", (moe.num_experts, hidden), "router", own)
    if model.router.moe_router_enable_expert_bias and not by_token_id:
        biases = (moe.num_experts,)
        yield ParameterShape(f"{name}.router.expert_bias", biases, "router", trained=False)
    latent = model.routed_size
    if moe.moe_latent_size is not None:
        for matrix, ways in (
            ("fc1_latent_proj", (latent, hidden)),
            ("fc2_latent_proj", (hidden, latent)),
        ):
            yield ParameterShape(f"{name}.{matrix}.weight", ways, "latents of experts", own)
            if model.add_bias_linear:
                full = f"{name}.{matrix}.bias"
                yield ParameterShape(full, ways[:1], "latents of experts", own)
    experts, inner = moe.num_experts // ranks.ep, moe.moe_ffn_hidden_size // ranks.etp
    wide = inner * (2 if model.mlp.is_gated else 1)
    for matrix, shape in (
        ("linear_fc1", (experts, wide, latent)),
        ("linear_fc2", (experts, latent, inner)),
    ):
        full = f"{name}.experts.{matrix}"
        yield ParameterShape(f"{full}.weight", shape, "experts", expert=True)
        if model.add_bias_linear:
            yield ParameterShape(f"{full}.bias", shape[:2], "experts", expert=True, vectors=True)
    if moe.moe_shared_expert_intermediate_size is None:
        return
    block, kind = f"{name}.shared_experts", "shared experts"
    if moe.moe_shared_expert_gate:
        yield ParameterShape(f"{block}.gate_weight", (1, hidden), kind, parted, vectors=True)
    width = moe.moe_shared_expert_intermediate_size
    yield from _mlp(model, block, width, ranks.tp, parted, kind)


def parameters_by_kind(model: TransformerConfig, rows: int) -> dict[str, int]:
    """Return the parameters of the whole model by kind, for a vocabulary of ``rows`` rows."""
    counts: Counter[str] = Counter()
    for parameter in all_parameters(model, rows):
        counts[parameter.kind] += parameter.numel
    return dict(counts)


def active_parameters(model: TransformerConfig, rows: int) -> int:
    """Return the parameters that work on one token: of experts, those that it visits."""
    kinds = parameters_by_kind(model, rows)
    experts = kinds.pop("experts", 0)
    if model.moe.num_experts is not None:
        experts = experts // model.moe.num_experts * model.router.moe_router_topk
    return sum(kinds.values()) + experts


def all_parameters(model: TransformerConfig, rows: int) -> Iterator[ParameterShape]:
    """Yield the parameters of the whole model, for a vocabulary of ``rows`` rows."""
    whole = Stage(range(model.all_layers), num_mtp_layers=model.mtp.depths)
    return stage_parameters(model, rows, whole)
