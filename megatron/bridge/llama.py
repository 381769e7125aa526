"""Llama (Touvron et al., 2023): ``LlamaForCausalLM`` of the transformers library.

Queries, keys and values are three matrices, as are gate, value and output of the MLP; ours keeps
for each group its query heads, its key head and its value head, and the gate above the value.
"""

import re
from collections.abc import Iterator
from typing import Any

from megatron.bridge.copies import Copy, whole
from megatron.bridge.family import EMBEDDING, FINAL_NORM, HEAD, Family
from megatron.bridge.settings import Settings
from megatron.core.sharding import Box
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.position_config import PositionConfig
from megatron.core.utils import divide

# Of Llama 3's rescaling only the factor can be chosen here; these are what all of its models have.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_CONSTANT = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


class Llama(Family):
    """Rotary positions, RMSNorm, a gated MLP with SiLU, grouped queries."""

    architecture = "LlamaForCausalLM"
    model_type = "llama"
    token_vectors = "model.embed_tokens.weight"

    def from_theirs(self, settings: Settings) -> dict[str, Any]:
        hidden, heads = settings.need("hidden_size", int), settings.need("num_attention_heads", int)
        groups = settings.take("num_key_value_heads", int, heads)
        settings.only(
            "hidden_act", "silu", "swish", why="a gate with SiLU is what can be expressed"
        )
        # How others cut the same products; it changes no result but by rounding.
        settings.skip("pretraining_tp")
        bias = settings.take("mlp_bias", bool, False)
        if settings.take("attention_bias", bool, False) != bias:
            raise settings.error(
                "attention_bias", f"here it must be mlp_bias, which is {str(bias).lower()}"
            )
        return {
            "num_layers": settings.need("num_hidden_layers", int),
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "group_query_attention": groups != heads,
            "num_query_groups": groups,
            "kv_channels": settings.take("head_dim", int, hidden // heads),
            "ffn_hidden_size": settings.need("intermediate_size", int),
            "swiglu": True,
            "add_bias_linear": bias,
            "normalization": "RMSNorm",
            "norm_epsilon": settings.take("rms_norm_eps", float, 1e-6),
            "position_embedding_type": "rope",
            "max_position_embeddings": settings.take("max_position_embeddings", int, 2048),
            **_rotation(settings),
            "attention_dropout": settings.take("attention_dropout", float, 0.0),
            "hidden_dropout": 0.0,
            "init_method_std": settings.take("initializer_range", float, 0.02),
            "untie_embeddings_and_output_weights": not settings.take(
                "tie_word_embeddings", bool, False
            ),
        }

    def to_theirs(self, config: TransformerConfig) -> dict[str, Any]:
        return {
            "num_hidden_layers": config.num_layers,
            "hidden_size": config.hidden_size,
            "num_attention_heads": config.attention.num_attention_heads,
            "num_key_value_heads": config.attention.num_query_groups,
            "head_dim": config.attention.kv_channels,
            "intermediate_size": config.mlp.ffn_hidden_size,
            "hidden_act": "silu",
            "attention_bias": config.add_bias_linear,
            "mlp_bias": config.add_bias_linear,
            "rms_norm_eps": config.norm.norm_epsilon,
            "max_position_embeddings": config.position.max_position_embeddings,
            "rope_theta": float(config.position.rotary_base),
            "rope_scaling": _scaling(config.position),
            "attention_dropout": config.attention.attention_dropout,
            "initializer_range": config.init.init_method_std,
            "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
        }

    def canonical(self, name: str) -> str | None:
        return None if _CONSTANT.fullmatch(name) else name

    def copies(self, config: TransformerConfig, rows: int) -> list[Copy]:
        hidden = config.hidden_size
        width = config.attention.num_attention_heads * config.attention.kv_channels
        kinds = ("weight", "bias") if config.add_bias_linear else ("weight",)
        found = [whole(self.token_vectors, EMBEDDING, rows, hidden)]
        for layer in range(config.num_layers):
            theirs, ours = f"model.layers.{layer}", f"decoder.layers.{layer}"
            for norm, name in (
                ("input_layernorm", "input_layernorm"),
                ("post_attention_layernorm", "pre_mlp_layernorm"),
            ):
                found.append(whole(f"{theirs}.{norm}.weight", f"{ours}.{name}.weight", hidden))
            for kind in kinds:
                columns = (hidden,) if kind == "weight" else ()
                qkv = f"{ours}.self_attention.linear_qkv.{kind}"
                for part, first, start, size in _heads(config):
                    source = f"{theirs}.self_attn.{part}_proj.{kind}"
                    found.append(_rows(source, first, qkv, start, size, *columns))
                shape = (hidden, width) if kind == "weight" else (hidden,)
                source = f"{theirs}.self_attn.o_proj.{kind}"
                found.append(whole(source, f"{ours}.self_attention.linear_proj.{kind}", *shape))
                found += self.channels(config, layer, kind)
        found.append(whole("model.norm.weight", f"{FINAL_NORM}.weight", hidden))
        if config.untie_embeddings_and_output_weights:
            found.append(whole(self.head, HEAD, rows, hidden))
        return found

    def channels(self, config: TransformerConfig, layer: int, kind: str) -> Iterator[Copy]:
        """Yield the weights or biases of a layer's MLP."""
        theirs, ours = f"model.layers.{layer}.mlp", f"decoder.layers.{layer}.mlp"
        hidden, inner = config.hidden_size, config.mlp.ffn_hidden_size
        columns = (hidden,) if kind == "weight" else ()
        for number, part in enumerate(("gate", "up")):
            source, target = f"{theirs}.{part}_proj.{kind}", f"{ours}.linear_fc1.{kind}"
            yield _rows(source, 0, target, number * inner, inner, *columns)
        shape = (hidden, inner) if kind == "weight" else (hidden,)
        yield whole(f"{theirs}.down_proj.{kind}", f"{ours}.linear_fc2.{kind}", *shape)


def _rotation(settings: Settings) -> dict[str, Any]:
    """Return what the rotary settings mean, as files of any version of the library have them."""
    base = settings.whole("rope_theta", 10000)
    scaling = settings.nested("rope_parameters")
    if scaling is not None:
        base = scaling.whole("rope_theta", base)
        settings.skip("rope_scaling")  # both are there in some files, and say the same
    else:
        scaling = settings.nested("rope_scaling")
    found: dict[str, Any] = {"rotary_base": base}
    if scaling is None:
        return found
    older = scaling.take("type", str, "default")
    kind = scaling.take("rope_type", str, older)
    if kind == "llama3":
        found |= {
            "use_rope_scaling": True,
            "rope_scaling_factor": scaling.need("factor", float),
        }
        for name, value in _LLAMA3.items():
            if scaling.take(name, float, value) != value:
                raise scaling.error(name, f"only {value:g} can be expressed here")
    elif kind == "linear":
        found["rotary_seq_len_interpolation_factor"] = scaling.whole("factor")
    elif kind != "default":
        name = "rope_type" if "rope_type" in scaling.values else "type"
        raise scaling.error(name, "default, linear and llama3 can be expressed here")
    partial = scaling.take("partial_rotary_factor", float, 1.0)
    if partial != 1.0:
        raise scaling.error("partial_rotary_factor", "this class rotates all channels")
    scaling.finish(())
    return found


def _scaling(position: PositionConfig) -> dict[str, Any] | None:
    if position.use_rope_scaling:
        return {"rope_type": "llama3", "factor": position.rope_scaling_factor, **_LLAMA3}
    factor = position.rotary_seq_len_interpolation_factor
    return None if factor is None else {"rope_type": "linear", "factor": float(factor)}


def _heads(config: TransformerConfig) -> Iterator[tuple[str, int, int, int]]:
    """Yield of each group's queries, key and value: whose rows, from which, to which, how many."""
    size, groups = config.attention.kv_channels, config.attention.num_query_groups
    queries = divide(config.attention.num_attention_heads, groups) * size
    for group in range(groups):
        start = group * (queries + 2 * size)
        yield "q", group * queries, start, queries
        yield "k", group * size, start + queries, size
        yield "v", group * size, start + queries + size, size


def _rows(source: str, first: int, target: str, start: int, size: int, *columns: int) -> Copy:
    rest: Box = tuple((0, width) for width in columns)
    return Copy(source, ((first, first + size), *rest), target, ((start, start + size), *rest))
