"""T5 (Raffel et al., 2020) and T5 1.1: ``T5ForConditionalGeneration`` of the transformers library.

Theirs has three matrices of queries, keys and values for each attention, where ours has one of all,
head by head, or, for cross-attention, one of keys and values. A block of theirs is a list of parts:
self-attention, in a decoder cross-attention, and the MLP. Scores are not scaled. The 1.0 kind
multiplies logits by ``d_model ** -0.5``; whether a model does was first said by
``tie_word_embeddings``, and later by ``scale_decoder_outputs``.
"""

import re
from collections.abc import Iterator
from typing import Any

from megatron.bridge.copies import Copy, whole
from megatron.bridge.family import EMBEDDING, HEAD, Family
from megatron.bridge.settings import Settings
from megatron.core.sharding import Box
from megatron.core.transformer.config import TransformerConfig

# Their name of an activation, in the order of preference: what it is here.
_ACTIVATIONS: dict[str, dict[str, Any]] = {
    "relu": {"relu": True},
    "gated-gelu": {"geglu_tanh": True},
    "gated-silu": {"swiglu": True},
    "gelu_new": {"openai_gelu": True},
    "gelu": {},
    "gated-gelu_new": {"geglu_tanh": True},
    "gated-gelu_pytorch_tanh": {"geglu_tanh": True},
    "gated-swish": {"swiglu": True},
}
_NAMES = {"geglu_tanh": "gated-gelu", "swiglu": "gated-silu", "gelu_tanh": "gelu_new"}
_ATTENTION, _CROSS = "self_attention", "cross_attention"
# Left by the first versions in every file, and read by none.
_CONSTANT = re.compile(r"decoder\.block\.\d+\.layer\.1\.EncDecAttention\.relative_attention_bias.*")
_POSITIONS = 512
"""Longest text that T5 was trained on; its positions have no end."""


class T5(Family):
    """Relative positions, RMSNorm, no biases, an encoder and a decoder."""

    architecture = "T5ForConditionalGeneration"
    model_type = "t5"
    token_vectors = "shared.weight"
    same_vectors = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    own_head_wins = True
    says_tied = '"tie_word_embeddings": true and "scale_decoder_outputs": false'
    kind = "an encoder with a decoder"
    run_settings = {"span_corruption": "random_spans"}  # its texts end with eos

    def from_theirs(self, settings: Settings) -> dict[str, Any]:
        hidden, layers = settings.need("d_model", int), settings.need("num_layers", int)
        tied = settings.take("tie_word_embeddings", bool, True)
        scaled = settings.take("scale_decoder_outputs", bool, tied)
        dropout = settings.take("dropout_rate", float, 0.1)
        # Initial values, other tasks, and what a library of 2020 kept between tokens.
        settings.skip("initializer_factor", "classifier_dropout", "output_past")
        return {
            "num_layers": layers,
            "decoder_num_layers": settings.take("num_decoder_layers", int, layers),
            "hidden_size": hidden,
            "num_attention_heads": settings.need("num_heads", int),
            "kv_channels": settings.need("d_kv", int),
            "ffn_hidden_size": settings.need("d_ff", int),
            "bias_gelu_fusion": False,
            **_activation(settings),
            "softmax_scale": 1.0,
            "add_bias_linear": False,
            "normalization": "RMSNorm",
            "norm_epsilon": settings.take("layer_norm_epsilon", float, 1e-6),
            "position_embedding_type": "relative",
            "max_position_embeddings": settings.take("n_positions", int, _POSITIONS),
            "relative_attention_num_buckets": settings.take(
                "relative_attention_num_buckets", int, 32
            ),
            "relative_attention_max_distance": settings.take(
                "relative_attention_max_distance", int, 128
            ),
            "hidden_dropout": dropout,
            "attention_dropout": dropout,
            "logit_multiplier": hidden**-0.5 if scaled else 1.0,
            "untie_embeddings_and_output_weights": not tied,
        }

    def to_theirs(self, config: TransformerConfig) -> dict[str, Any]:
        activation = config.mlp.activation
        return {
            "num_layers": config.num_layers,
            "num_decoder_layers": config.stacks.decoder_num_layers,
            "d_model": config.hidden_size,
            "num_heads": config.attention.num_attention_heads,
            "d_kv": config.attention.kv_channels,
            "d_ff": config.mlp.ffn_hidden_size,
            "feed_forward_proj": _NAMES.get(activation, activation),
            "layer_norm_epsilon": config.norm.norm_epsilon,
            "n_positions": config.position.max_position_embeddings,
            "relative_attention_num_buckets": config.position.relative_attention_num_buckets,
            "relative_attention_max_distance": config.position.relative_attention_max_distance,
            "dropout_rate": config.hidden_dropout,
            "initializer_factor": 1.0,
            "is_encoder_decoder": True,
            "scale_decoder_outputs": config.logit_multiplier != 1.0,
            "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
        }

    def canonical(self, name: str) -> str | None:
        return None if _CONSTANT.fullmatch(name) else name

    def copies(self, config: TransformerConfig, rows: int) -> list[Copy]:
        hidden = config.hidden_size
        found = [whole(self.token_vectors, EMBEDDING, rows, hidden)]
        shape = config.position.relative_attention_num_buckets, config.attention.num_attention_heads
        decoder_layers = config.stacks.decoder_num_layers
        assert decoder_layers is not None, "a family of two stacks"
        for stack, layers in (("encoder", config.num_layers), ("decoder", decoder_layers)):
            table = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
            found.append(whole(table, f"{stack}_relative_pos_emb.weight", *shape))
            for layer in range(layers):
                found += _layer(config, stack, layer)
            norm = f"{stack}.final_layer_norm.weight", f"{stack}.final_layernorm.weight"
            found.append(whole(*norm, hidden))
        if config.untie_embeddings_and_output_weights:
            found.append(whole(self.head, HEAD, rows, hidden))
        return found


def _activation(settings: Settings) -> dict[str, Any]:
    """Return what feed_forward_proj means; other settings may say it once more."""
    name = settings.take("feed_forward_proj", str, "relu")
    if name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise settings.error("feed_forward_proj", f"what can be expressed here is {known}")
    gate, _, inner = name.rpartition("-")
    if name == "gated-gelu":
        inner = "gelu_new"
    settings.only("is_gated_act", bool(gate), why=f"feed_forward_proj ({name}) says otherwise")
    settings.only("dense_act_fn", inner, why=f"feed_forward_proj ({name}) says {inner}")
    return _ACTIVATIONS[name]


def _layer(config: TransformerConfig, stack: str, layer: int) -> Iterator[Copy]:
    """Yield the tensors of one block."""
    hidden = config.hidden_size
    theirs, ours = f"{stack}.block.{layer}.layer", f"{stack}.layers.{layer}"
    parts = ["input_layernorm", "pre_mlp_layernorm"]
    attention = f"{theirs}.0.SelfAttention"
    yield from _heads(config, attention, "qkv", f"{ours}.{_ATTENTION}.linear_qkv.weight")
    yield _projection(config, attention, f"{ours}.{_ATTENTION}")
    if stack == "decoder":
        parts.insert(1, "pre_cross_attn_layernorm")
        attention = f"{theirs}.1.EncDecAttention"
        yield from _heads(config, attention, "q", f"{ours}.{_CROSS}.linear_q.weight")
        yield from _heads(config, attention, "kv", f"{ours}.{_CROSS}.linear_kv.weight")
        yield _projection(config, attention, f"{ours}.{_CROSS}")
    for number, name in enumerate(parts):
        yield whole(f"{theirs}.{number}.layer_norm.weight", f"{ours}.{name}.weight", hidden)
    dense, inner = f"{theirs}.{len(parts) - 1}.DenseReluDense", config.mlp.ffn_hidden_size
    for number, name in enumerate(("wi_0", "wi_1") if config.mlp.is_gated else ("wi",)):
        box = ((number * inner, (number + 1) * inner), (0, hidden))
        target = f"{ours}.mlp.linear_fc1.weight"
        yield Copy(f"{dense}.{name}.weight", ((0, inner), (0, hidden)), target, box)
    yield whole(f"{dense}.wo.weight", f"{ours}.mlp.linear_fc2.weight", hidden, inner)


def _heads(config: TransformerConfig, theirs: str, letters: str, ours: str) -> Iterator[Copy]:
    """Yield each head's rows of the matrices that are one of ours."""
    size = config.attention.kv_channels
    columns = (0, config.hidden_size)
    for head in range(config.attention.num_attention_heads):
        for number, letter in enumerate(letters):
            start = (head * len(letters) + number) * size
            source: Box = ((head * size, (head + 1) * size), columns)
            yield Copy(f"{theirs}.{letter}.weight", source, ours, ((start, start + size), columns))


def _projection(config: TransformerConfig, theirs: str, ours: str) -> Copy:
    width = config.attention.num_attention_heads * config.attention.kv_channels
    return whole(f"{theirs}.o.weight", f"{ours}.linear_proj.weight", config.hidden_size, width)
