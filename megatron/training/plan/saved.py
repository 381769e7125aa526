"""What each part of a model saves for its backward, by name and size; from configs alone.

A sub-layer is a row of regions, in the order of its forward: norm, projections, attention, MLP,
residual. A region lists the pieces of memory that autograd saves there; the same piece may stand in
several. `activations` says what becomes of them when a run recomputes or offloads.

Shapes in comments: N tokens of a rank, n heads and g query groups of a tensor-parallel rank, D head
size, f inner width of a rank.
"""

from megatron.core.transformer.plan import SublayerPlan
from megatron.training.plan import attention_bytes, multi_latent, saved_channels, stacks
from megatron.training.plan.attention_bytes import Heads, Piece, Texts
from megatron.training.plan.share import Region, Share

TOKEN = 8
"""Bytes of a token's number."""


def regions(share: Share, sublayer: SublayerPlan, layer: int) -> list[Region]:
    """Return the regions of one sub-layer."""
    is_mlp = sublayer.kind in ("mlp", "moe")
    stream, normed = share.norm()[0], share.normed
    norm = Region(
        "norm",
        share.norm(),
        inputs=(stream,),
        outputs=(normed,),
        recomputed="layernorm",
        offloaded="mlp_norm" if is_mlp else "attn_norm",
    )
    blocks = {
        "mlp": saved_channels.mlp,
        "moe": saved_channels.experts,
        "self_attention": _attention,
        "cross_attention": _cross_attention,
        "multi_latent_attention": _latents,
    }
    mask = Piece("mask", share.masks, 1)
    return [norm, *blocks[sublayer.kind](share, layer), Region("residual", (mask,))]


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
    found = [Region("in", (share.normed,), share.stream + qkv, offloaded="qkv_linear")]
    if own:
        found.append(Region("heads", tuple(own), offloaded="qkv_linear", joins=True))
    heads_ = Heads(n, g, attention.kv_channels, attention.kv_channels)
    return [*found, *_mixing(share, layer, heads_, given, head * n, _own_text(share, layer))]


def _own_text(share: Share, layer: int) -> Texts:
    """Return what self-attention sees."""
    model, length = share.config.model, share.positions
    is_causal = model.layer_is_causal(layer)
    return Texts(
        length,
        length,
        causal=is_causal,
        padded=model.has_two_stacks and not is_causal,
        biased=model.position.position_embedding_type == "relative",
    )


def _cross_attention(share: Share, layer: int) -> list[Region]:
    """Return attention to what an encoder gave, which counts once for all layers (`encoded`)."""
    attention, size = share.config.model.attention, share.size
    sources = share.of(stacks.lengths(share.config)[0])
    n = attention.num_attention_heads // share.tp
    heads = Heads(n, n, attention.kv_channels, attention.kv_channels)
    q, kv = (x.tokens * n * attention.kv_channels * size for x in (share, sources))
    queries, pairs = Piece("queries", q, size), Piece("keys and values", 2 * kv, size)
    given = [queries, pairs, pairs]
    texts = Texts(share.positions, sources.positions, causal=False, padded=True)
    late = share.stream + q + 2 * kv
    return [
        Region("in", (share.normed,), late),
        *_mixing(share, layer, heads, given, q, texts),
    ]


def encoded(share: Share, *, is_made_here: bool) -> tuple[int, int]:
    """Return (kept, postponed) of what an encoder gave, which all layers of a decoder keep.

    Args:
        share: of the encoder's text.
        is_made_here: it is the encoder's own output, and not a part of what a stage was sent.
    """
    if is_made_here or share.size != share.wide:
        return share.stream, share.stream
    return 0, share.of(sum(stacks.lengths(share.config))).residual


def biases(share: Share) -> int:
    """Return the bytes of a stack's biases by distance, and of what makes them."""
    model, length = share.config.model, share.positions
    if model.position.position_embedding_type != "relative":
        return 0
    heads, rows = model.attention.num_attention_heads // share.tp, share.tokens // share.samples
    # Scores that exist as a matrix have the biases added, and forget them.
    kept = 0 if model.attention_backend in ("unfused", "local") else heads * rows * length
    return kept * share.size + (2 * length - 1 + rows) * TOKEN


def _mixing(
    share: Share,
    layer: int,
    heads: Heads,
    given: list[Piece],
    output: int,
    texts: Texts,
) -> list[Region]:
    """Return attention itself, and the projection of its output."""
    core = attention_bytes.saved(share.config, layer, share.samples, heads, given, texts)
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
    ranks = multi_latent.latents(model)
    down, latents = [share.normed], list[Piece]()
    for name, rank in ranks.items():
        latents.append(Piece(name, outer * rank * size, size))  # the up projection's input
        if model.attention.qk_layernorm:
            width = rank if name == "q_layernorm" else sizes.down_size
            down += share.inner_norm(f"{name} input", outer * width, outer)
    turning = Piece("rotary key", outer * sizes.qk_pos_emb_head_dim * size, size)
    # Straight from the hidden state, or from a latent.
    queries = [share.normed] if sizes.q_lora_rank is None else []
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
        *_mixing(share, layer, heads, given, token * n * heads.values, _own_text(share, layer)),
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
    if model.bert.token_types:
        kept += share.tokens * TOKEN
    return kept


def words_head(share: Share) -> tuple[int, int]:
    """Return (kept, postponed) of what a head of masked words does before it makes logits.

    Its dense layer keeps what it is given, and so do the activation and the norm behind it; that of
    the order keeps a vector for each sample.
    """
    hidden = share.config.model.hidden_size
    norm = sum(piece.size for piece in share.inner_norm("words", share.outer * hidden, share.outer))
    kept, late = 2 * share.stream + norm, 2 * share.stream
    if share.config.model.bert.sentence_order_head:
        vectors = share.samples * hidden * share.size
        gathered = share.tp if share.outer != share.tokens else 0
        kept += vectors * (1 + gathered)
        late += 2 * vectors
    return kept, late


def losses(share: Share, logits: int, pieces: int) -> tuple[int, int]:
    """Return (kept, postponed) of the head after its norm, for so many local logits."""
    if pieces > 1:  # a piece's logits are made again in its backward, from inputs and targets
        return share.output + share.tokens * (
            share.main + TOKEN
        ), share.output + logits * share.size
    kept = share.stream + logits * share.exponentials
    if share.config.model.logit_softcap is not None:
        kept += logits * share.size  # the slope of tanh
    # What makes a softmax of exponentials, the target and the mask of each token.
    kept += share.tokens * (2 * share.main + TOKEN)
    return kept, share.stream + logits * share.size
