"""What each part of a model saves for its backward, by name and size; from configs alone.

A sub-layer is a row of regions, in the order of its forward: norm, projections, attention, MLP,
residual. A region lists the pieces of memory that autograd saves there; the same piece may stand in
several. `activations` says what becomes of them when a run recomputes or offloads.

Shapes in comments: N tokens of a rank, n heads and g query groups of a tensor-parallel rank, D head
size, f inner width of a rank.
"""

from dataclasses import dataclass
from functools import cached_property

from megatron.core.optimizer.memory import BYTES
from megatron.core.transformer.plan import SublayerPlan
from megatron.training.config import RunConfig
from megatron.training.plan import accounting_mla, attention_bytes
from megatron.training.plan.attention_bytes import Heads, Piece

TOKEN = 8
"""Bytes of a token's number."""

SAVED_BY_ACTIVATION = {
    "gelu": 0,
    "gelu_tanh": 0,
    "squared_relu": 0,  # what is above zero, instead of its input
    "swiglu": 0,  # the op of its own saves its input alone
    "geglu": 1,  # the gate's activation
    "quick_geglu": 2,  # and its sigmoid
}
"""What an activation saves beside its input, as multiples of the inner width."""


@dataclass(frozen=True)
class Share:
    """What one rank sees of a microbatch of ``samples``."""

    config: RunConfig
    samples: int

    @cached_property
    def tp(self) -> int:
        """Tensor-parallel ranks."""
        return self.config.parallel.tensor_model_parallel_size

    @cached_property
    def tokens(self) -> int:
        """Tokens inside attention and MLP."""
        parallel = self.config.parallel
        return self.samples * (self.config.data.seq_length // parallel.context_parallel_size)

    @cached_property
    def outer(self) -> int:
        """Tokens between them: less with sequence parallelism."""
        return self.samples * (self.config.data.seq_length // self.config.sequence_shares)

    @cached_property
    def size(self) -> int:
        """Bytes of an activation's element."""
        return BYTES[self.config.precision.params_dtype]

    @cached_property
    def main(self) -> int:
        """Bytes of an element of sums."""
        return BYTES[self.config.precision.accumulation_dtype]

    @cached_property
    def exponentials(self) -> int:
        """Bytes of an exponential of a logit."""
        return self.size if self.config.model.fp16_lm_cross_entropy else self.main

    @cached_property
    def wide(self) -> int:
        """Bytes of an element of the residual stream."""
        return BYTES[self.config.residual_dtype]

    @cached_property
    def residual(self) -> int:
        """Bytes of the hidden states between blocks."""
        return self.outer * self.config.model.hidden_size * self.wide

    @cached_property
    def stream(self) -> int:
        """Bytes of the hidden states that a block is given by its norm."""
        return self.outer * self.config.model.hidden_size * self.size

    @cached_property
    def output(self) -> int:
        """Bytes of a block's output before ranks share it: a gradient that is put off holds it."""
        return self.tokens * self.config.model.hidden_size * self.size

    @cached_property
    def masks(self) -> int:
        """Bytes of a dropout mask of hidden states."""
        model = self.config.model
        return self.outer * model.hidden_size if model.hidden_dropout else 0

    def row(self, size: int) -> int:
        """Return the bytes that a norm saves for a row of elements of ``size`` bytes."""
        if self._vectors == 1:
            return self.main
        # On the CPU torch keeps mean and deviation in the dtype of the input.
        return 2 * (size if self.config.process.device == "cpu" else self.main)

    @cached_property
    def _vectors(self) -> int:
        """Gains, and shifts where a norm has them."""
        return 2 if self.config.model.norm.normalization == "LayerNorm" else 1

    def norm(self, of: str = "stream") -> tuple[Piece, ...]:
        """Return what a norm of hidden states saves: its input, and its rows' statistics.

        Of gains it saves a copy where the residual stream has another dtype than they have.
        """
        row, count = self.row(self.wide), self._vectors
        statistics = [
            Piece(f"statistic {i} of {of}", self.outer * row // count, row // count)
            for i in range(count)
        ]
        hidden = self.config.model.hidden_size
        gains = [
            Piece(f"gains {i} of {of}", hidden * self.wide, self.wide)
            for i in range(count)
            if self.wide != self.size
        ]
        return (Piece(of, self.residual, self.wide), *statistics, *gains)

    def inner_norm(self, name: str, elements: int, rows: int) -> tuple[Piece, ...]:
        """Return what a norm within a block saves."""
        row, count = self.row(self.size), self._vectors
        statistics = (
            Piece(f"statistic {i} of {name}", rows * row // count, row // count)
            for i in range(count)
        )
        return (Piece(name, elements * self.size, self.size), *statistics)


@dataclass(frozen=True)
class Region:
    """A part of a sub-layer that runs, is recomputed or is offloaded as one."""

    name: str
    saved: tuple[Piece, ...]
    late: int = 0
    """Bytes that its weights' gradients hold on to when they are put off."""
    inputs: tuple[Piece, ...] = ()
    """What it keeps when it is recomputed."""
    outputs: tuple[Piece, ...] = ()
    """What it can make again for those who save it."""
    recomputed: str = ""
    """Its name in --recompute-modules."""
    offloaded: str = ""
    """Its name in --offload-modules."""
    joins: bool = False
    """It is offloaded in one group with the region before it."""


def regions(share: Share, sublayer: SublayerPlan, layer: int) -> list[Region]:
    """Return the regions of one sub-layer."""
    is_mlp = sublayer.kind == "mlp"
    stream, normed = share.norm()[0], _normed(share)
    norm = Region(
        "norm",
        share.norm(),
        inputs=(stream,),
        outputs=(normed,),
        recomputed="layernorm",
        offloaded="mlp_norm" if is_mlp else "attn_norm",
    )
    blocks = {"mlp": _mlp, "self_attention": _attention, "multi_latent_attention": _latents}
    mask = Piece("mask", share.masks, 1)
    return [norm, *blocks[sublayer.kind](share, layer), Region("residual", (mask,))]


def _normed(share: Share) -> Piece:
    return Piece("normed", share.stream, share.size)


def _mlp(share: Share, layer: int) -> list[Region]:
    mlp, size, normed = share.config.model.mlp, share.size, _normed(share)
    inner = share.tokens * (mlp.ffn_hidden_size // share.tp) * size
    # The second product's input and, once there are gradients, those of both products' outputs.
    wide = inner * (2 if mlp.is_gated else 1)
    more = [
        Piece(f"activation {i}", inner, size) for i in range(SAVED_BY_ACTIVATION[mlp.activation])
    ]
    act = (Piece("fc1 output", wide, size), *more, Piece("fc2 input", inner, size))
    if "mlp" in share.config.model.recompute.modules:
        late = share.stream + wide + inner + share.output
        return [Region("mlp", (normed, *act), late, inputs=(normed,), recomputed="mlp")]
    return [
        Region("in", (normed,), share.stream + wide),
        Region("mlp", act, inner + share.output),
    ]


def _attention(share: Share, layer: int) -> list[Region]:
    model, tp, size = share.config.model, share.tp, share.size
    attention = model.attention
    n, g = attention.num_attention_heads // tp, max(1, attention.num_query_groups // tp)
    head = share.tokens * attention.kv_channels * size
    # The query heads of several groups do not lie side by side: they are copied out.
    mixed = Piece("mixed", head * (n + 2 * g), size)
    queries = Piece("queries", head * n, size) if 1 < g < n else mixed
    new = [Piece("new queries", head * n, size), Piece("new keys", head * g, size)]
    given, own = [queries, mixed, mixed], list[Piece]()
    if attention.qk_layernorm or attention.qk_l2_norm:
        own += [queries, mixed]
        if attention.qk_layernorm:
            for name, heads in (("q", n), ("k", g)):
                own += share.inner_norm(name, 0, share.tokens * heads)[1:]
        else:
            for name, heads in (("q", n), ("k", g)):
                own.append(Piece(f"rows of {name}", share.tokens * heads * share.main, share.main))
        given[:2] = new
    if model.position.layer_rotates(layer):
        given[:2] = new
    qkv = head * (n + 2 * g)
    found = [Region("in", (_normed(share),), share.stream + qkv, offloaded="qkv_linear")]
    if own:
        found.append(Region("heads", tuple(own), offloaded="qkv_linear", joins=True))
    heads_ = Heads(n, g, attention.kv_channels, attention.kv_channels)
    return [*found, *_mixing(share, layer, heads_, given, head * n)]


def _mixing(
    share: Share, layer: int, heads: Heads, given: list[Piece], output: int
) -> list[Region]:
    """Return attention itself, and the projection of its output."""
    core = attention_bytes.saved(share.config, layer, share.samples, heads, given)
    name, inputs = "core_attn", tuple(dict.fromkeys(given))
    out = Piece("output", output, share.size)
    return [
        Region("core", tuple(core), inputs=inputs, recomputed=name, offloaded=name),
        Region("proj", (out,), output + share.output, offloaded="attn_proj"),
    ]


def _latents(share: Share, layer: int) -> list[Region]:
    model, sizes, size = share.config.model, share.config.model.mla, share.size
    n = model.attention.num_attention_heads // share.tp
    heads = Heads(n, n, sizes.query_size, sizes.v_head_dim)
    token, outer = share.tokens * size, share.outer
    q, kv = token * n * heads.channels, token * n * (sizes.qk_head_dim + heads.values)
    given = [
        Piece("new queries", q, size),
        Piece("new keys", q, size),
        Piece("keys and values", kv, size),
    ]
    ranks = accounting_mla.latents(model)
    down, latents = [_normed(share)], list[Piece]()
    for name, rank in ranks.items():
        latents.append(Piece(name, outer * rank * size, size))  # the up projection's input
        if model.attention.qk_layernorm:
            width = rank if name == "q_layernorm" else sizes.down_size
            down += share.inner_norm(f"{name} input", outer * width, outer)
    turning = Piece("rotary key", outer * sizes.qk_pos_emb_head_dim * size, size)
    # Straight from the hidden state, or from a latent.
    queries = [_normed(share)] if sizes.q_lora_rank is None else []
    up = (*queries, *latents)
    late = share.stream + outer * size * ((sizes.q_lora_rank or 0) + sizes.down_size)
    return [
        Region("in", tuple(down), late, offloaded="qkv_linear"),
        Region(
            "up",
            up,
            outer * size * sum(ranks.values()) + q + kv,
            inputs=(*up, turning),
            outputs=tuple(given),
            recomputed="mla_up_proj",
            offloaded="qkv_linear",
        ),
        *_mixing(share, layer, heads, given, token * n * heads.values),
    ]


def embedding(share: Share) -> int:
    """Return the bytes that the first stage saves before its layers."""
    config, model = share.config, share.config.model
    kept = share.tokens * TOKEN + share.masks
    if share.tp > 1:
        kept += share.tokens  # which of them are in other ranks' rows
    learned = model.position.position_embedding_type == "learned_absolute"
    if learned and config.data.reset_position_ids:
        kept += share.tokens * TOKEN
    return kept


def losses(share: Share, logits: int, pieces: int) -> tuple[int, int]:
    """Return (kept, postponed) of the head after its norm, for so many local logits."""
    if pieces > 1:  # a piece's logits are made again in its backward
        return share.output, share.output + logits * share.size
    kept = share.stream + logits * share.exponentials
    if share.config.model.logit_softcap is not None:
        kept += logits * share.size  # the slope of tanh
    # What makes a softmax of exponentials, the target and the mask of each token.
    kept += share.tokens * (2 * share.main + TOKEN)
    return kept, share.stream + logits * share.size
