"""What a microbatch keeps on a rank until its backward, in bytes, from configs alone.

Counted is every tensor that autograd saves, once for each piece of memory: a view keeps the whole
of what it is a view of. Per layer these are the inputs of norms and matrix products, what the
activation and the attention op save (`attention_bytes`), and dropout masks of a byte per element;
the ends of the model add token numbers, masks and exponentials of logits. What lives only while
an operation works is left out, but for a second copy of the logits, the largest of it.

How close it is: on the CPU, tensors saved by built models take these bytes to 0.1% (mostly to the
byte), for every kind of norm, activation, position and attention that there is, fp32, bf16 and
fp64, tensor, sequence and context parallelism of every kind, stages of every content; and so does
the most that is saved at once in an iteration of every pipeline schedule. Tests repeat it. Packed
documents are counted as if each filled its sample. Not measured is what torch's fused attention
saves on CUDA: it is taken to be queries, keys, values, output and a number per head and token, or
a mask where there are documents or ALiBi.

Shapes in comments: N tokens of a rank, n heads and g query groups of a tensor-parallel rank, D head
size, f inner width of a rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from megatron.core.optimizer.memory import BYTES
from megatron.core.pipeline_parallel.stages import Stage
from megatron.core.transformer.plan import LayerPlan, layer_plan, loss_pieces, mtp_layer_plan
from megatron.training.config import RunConfig
from megatron.training.plan import accounting_mla, attention_bytes
from megatron.training.plan.attention_bytes import Heads, Piece

TOKEN = 8
"""Bytes of a token's number."""

SAVED_BY_ACTIVATION = {
    "gelu": 1,
    "gelu_tanh": 1,
    "squared_relu": 1,  # what is above zero
    "swiglu": 2,  # the op of its own saves its input alone
    "geglu": 3,  # and the gate's activation
    "quick_geglu": 4,  # and its sigmoid
}
"""What an activation saves, as multiples of the inner width."""


@dataclass(frozen=True)
class Footprint:
    """Bytes of one microbatch in one chunk of a model."""

    kept: int
    """From its forward to its backward."""
    postponed: int
    """From the backward of its inputs to that of its weights."""
    working: int
    """For a moment, by the microbatch at work."""


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

    @cached_property
    def norm(self) -> int:
        """Bytes that a norm of hidden states saves: its input, and its rows' statistics.

        Of gains it saves a copy where the residual stream has another dtype than they have.
        """
        gains = self._vectors * self.config.model.hidden_size * self.wide
        return self.residual + self.outer * self.row(self.wide) + gains * (self.wide != self.size)

    def row(self, size: int) -> int:
        """Return the bytes that a norm saves for a row of elements of ``size`` bytes."""
        if self._vectors == 1:
            return self.main
        # On the CPU torch keeps mean and deviation in the dtype of the input.
        return 2 * (size if self.config.process.device == "cpu" else self.main)

    @cached_property
    def statistics(self) -> int:
        """Bytes that a norm within a block saves for a row."""
        return self.row(self.size)

    @cached_property
    def _vectors(self) -> int:
        """Gains, and shifts where a norm has them."""
        return 2 if self.config.model.norm.normalization == "LayerNorm" else 1


def footprint(config: RunConfig, padded_rows: int, stage: Stage, samples: int) -> Footprint:
    """Return what a microbatch of ``samples`` keeps in the chunk that is ``stage``."""
    share = Share(config, samples)
    parts = [*_layers(share, stage)]
    working = 0
    if stage.is_first:
        parts.append((_embedding(share), 0))
    if stage.is_last:
        rows = padded_rows // share.tp
        logits = share.tokens * rows
        sequence = share.tokens // samples
        limit = config.model.logits_at_once
        pieces = loss_pieces(sequence, samples, rows, limit=limit) if samples else 1
        parts.append(_head(share, logits, pieces))
        for depth in range(stage.num_mtp_layers):
            parts += [*_ahead(share, depth), _head(share, logits, pieces)]
        copied = share.size if share.size != share.exponentials else 0
        working = logits * copied
        if pieces > 1:
            each = share.size + (copied and share.exponentials)
            working = -(-sequence // pieces) * samples * rows * each
    if not (stage.layers or stage.is_first or stage.is_last):
        parts.append((share.residual, 0))  # it hands on what it gets, and keeps it
    return Footprint(sum(kept for kept, _ in parts), sum(late for _, late in parts), working)


def _layers(share: Share, stage: Stage) -> Iterator[tuple[int, int]]:
    """Yield (kept, postponed) of each sub-layer, and of what the layers have in common."""
    plan = layer_plan(share.config.model)
    for number in stage.layers:
        yield from _layer(share, plan[number])
    yield share.tokens * _rotated(share, stage) * share.main, 0


def _layer(share: Share, plan: LayerPlan) -> Iterator[tuple[int, int]]:
    """Yield (kept, postponed) of each sub-layer of one layer."""
    parts = {"mlp": _mlp, "self_attention": _attention, "multi_latent_attention": _latents}
    for sublayer in plan.sublayers:
        kept, postponed = parts[sublayer.kind](share, plan.number)
        # The norm's input, the block's input and the residual's mask.
        yield share.norm + share.stream + share.masks + kept, share.stream + postponed


def _ahead(share: Share, depth: int) -> Iterator[tuple[int, int]]:
    """Yield (kept, postponed) of a layer of multi-token prediction up to its last norm."""
    # The norm of the hidden states has an input that the head keeps already.
    norms = share.norm + share.outer * share.statistics
    yield _embedding(share) + norms + 2 * share.stream, 3 * share.stream
    yield from _layer(share, mtp_layer_plan(share.config.model, depth))


def _rotated(share: Share, stage: Stage) -> int:
    """Return the channels that rotate by angles of this microbatch alone."""
    model = share.config.model
    if not share.config.data.reset_position_ids:
        return 0  # cosines and sines are made once and for all
    if model.mla.multi_latent_attention:
        return model.mla.qk_pos_emb_head_dim if stage.layers or stage.num_mtp_layers else 0
    numbers = [*stage.layers, *range(stage.num_mtp_layers)]
    rotates = any(map(model.position.layer_rotates, numbers))
    return model.position.rotated_channels(model.attention.kv_channels) if rotates else 0


def _mlp(share: Share, layer: int) -> tuple[int, int]:
    """Return what lies between the block's input and its output."""
    mlp = share.config.model.mlp
    inner = share.tokens * (mlp.ffn_hidden_size // share.tp) * share.size
    # The second product's input and, once there are gradients, those of both products' outputs.
    wide = inner * (2 if mlp.is_gated else 1)
    return inner * (SAVED_BY_ACTIVATION[mlp.activation] + 1), inner + wide + share.output


def _attention(share: Share, layer: int) -> tuple[int, int]:
    """Return what lies between the block's input and its output."""
    model, tp = share.config.model, share.tp
    attention = model.attention
    n, g = attention.num_attention_heads // tp, max(1, attention.num_query_groups // tp)
    head = share.tokens * attention.kv_channels * share.size
    # The query heads of several groups do not lie side by side: they are copied out.
    mixed = ("mixed", head * (n + 2 * g))
    queries = ("queries", head * n) if 1 < g < n else mixed
    given, kept = [queries, mixed, mixed], {"output": head * n}
    if attention.qk_layernorm or attention.qk_l2_norm:
        kept.update([queries, mixed])
        row = share.statistics if attention.qk_layernorm else share.main
        kept["statistics"] = share.tokens * (n + g) * row
        given[:2] = [("new queries", head * n), ("new keys", head * g)]
    if model.position.layer_rotates(layer):
        given[:2] = [("new queries", head * n), ("new keys", head * g)]
    heads = Heads(n, g, attention.kv_channels, attention.kv_channels)
    kept.update(attention_bytes.saved(share.config, layer, share.samples, heads, given))
    return sum(kept.values()), head * (n + n + 2 * g) + share.output


def _latents(share: Share, layer: int) -> tuple[int, int]:
    """Return what lies between the input of multi-latent attention and its output."""
    model, sizes = share.config.model, share.config.model.mla
    n = model.attention.num_attention_heads // share.tp
    heads = Heads(n, n, sizes.query_size, sizes.v_head_dim)
    token, outer = share.tokens * share.size, share.outer * share.size
    q, kv = token * n * heads.channels, token * n * (sizes.qk_head_dim + heads.values)
    out = token * n * heads.values
    given: list[Piece] = [("new queries", q), ("new keys", q), ("keys and values", kv)]
    kept = {"output": out}
    for name, rank in accounting_mla.latents(model).items():
        kept[name] = outer * rank  # the up projection's input
        if model.attention.qk_layernorm:
            down = rank if name == "q_layernorm" else sizes.down_size
            kept[f"{name} input"] = outer * down + share.outer * share.statistics
    kept.update(attention_bytes.saved(share.config, layer, share.samples, heads, given))
    # Inputs of the up projections and of the last one, and the gradients of all outputs.
    inputs = outer * sum(accounting_mla.latents(model).values()) + out
    grads = q + kv + outer * ((sizes.q_lora_rank or 0) + sizes.down_size)
    return sum(kept.values()), inputs + grads + share.output


def _embedding(share: Share) -> int:
    """Return what the first stage saves before its layers."""
    config, model = share.config, share.config.model
    kept = share.tokens * TOKEN + share.masks
    if share.tp > 1:
        kept += share.tokens  # which of them are in other ranks' rows
    learned = model.position.position_embedding_type == "learned_absolute"
    if learned and config.data.reset_position_ids:
        kept += share.tokens * TOKEN
    return kept


def _head(share: Share, logits: int, pieces: int) -> tuple[int, int]:
    """Return what the last stage saves after its layers, for so many local logits."""
    if pieces > 1:  # a piece's logits are made again in its backward
        return share.norm + share.output, share.output + logits * share.size
    kept = share.norm + share.stream + logits * share.exponentials
    if share.config.model.logit_softcap is not None:
        kept += logits * share.size  # the slope of tanh
    # Three sums, the target and the mask of each token.
    kept += share.tokens * (4 * share.main + TOKEN)
    return kept, share.stream + logits * share.size
