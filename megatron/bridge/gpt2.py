"""GPT-2 (Radford et al., 2019): ``GPT2LMHeadModel`` of the transformers library.

Its linear layers hold matrices ``[in, out]``, mirrored to ours; those of queries, keys and values
are one, first all queries, then all keys, then all values, where ours goes head by head.
"""

import re
from typing import Any

from megatron.bridge.copies import Copy, whole
from megatron.bridge.family import EMBEDDING, FINAL_NORM, HEAD, POSITIONS, Family
from megatron.bridge.settings import Settings
from megatron.core.transformer.config import TransformerConfig

# Their names of GELU by the tanh formula, then of the exact one.
_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
_EXACT = "gelu"
_ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu": _EXACT}
_CONSTANT = re.compile(r"transformer\.h\.\d+\.attn\.(masked_)?bias")


class GPT2(Family):
    """Learned positions, LayerNorm, biases everywhere, plain GELU."""

    architecture = "GPT2LMHeadModel"
    model_type = "gpt2"
    token_vectors = "transformer.wte.weight"

    def from_theirs(self, settings: Settings) -> dict[str, Any]:
        hidden, heads = settings.need("n_embd", int), settings.need("n_head", int)
        activation = settings.take("activation_function", str, "gelu_new")
        if activation not in (*_TANH, _EXACT):
            raise settings.error("activation_function", "GELU is what can be expressed here")
        settings.only(
            "scale_attn_by_inverse_layer_idx",
            False,
            why="attention that is scaled by layers cannot be expressed here",
        )
        settings.only("add_cross_attention", False, why="a decoder alone can be expressed here")
        # The same products, computed more finely in half precision; what depends on others; what
        # concerns heads for other tasks.
        settings.skip("reorder_and_upcast_attn", "n_ctx")
        settings.skip(*(name for name in settings.values if name.startswith("summary_")))
        dropout = settings.take("resid_pdrop", float, 0.1)
        embedding = settings.take("embd_pdrop", float, 0.1)
        if embedding != dropout:
            raise settings.error("embd_pdrop", f"here it must be resid_pdrop, which is {dropout}")
        scaled = settings.take("scale_attn_weights", bool, True)
        return {
            "num_layers": settings.need("n_layer", int),
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "ffn_hidden_size": settings.take("n_inner", int, 4 * hidden),
            "position_embedding_type": "learned_absolute",
            "max_position_embeddings": settings.need("n_positions", int),
            "normalization": "LayerNorm",
            "norm_epsilon": settings.take("layer_norm_epsilon", float, 1e-5),
            "add_bias_linear": True,
            # As Megatron-LM's flags for this model have it.
            "bias_gelu_fusion": activation in _TANH,
            "softmax_scale": None if scaled else 1.0,
            "attention_dropout": settings.take("attn_pdrop", float, 0.1),
            "hidden_dropout": dropout,
            "init_method_std": settings.take("initializer_range", float, 0.02),
            "untie_embeddings_and_output_weights": not settings.take(
                "tie_word_embeddings", bool, True
            ),
        }

    def to_theirs(self, config: TransformerConfig) -> dict[str, Any]:
        return {
            "n_layer": config.num_layers,
            "n_embd": config.hidden_size,
            "n_head": config.attention.num_attention_heads,
            "n_inner": config.mlp.ffn_hidden_size,
            "n_positions": config.position.max_position_embeddings,
            "activation_function": _ACTIVATIONS.get(config.mlp.activation, _EXACT),
            "layer_norm_epsilon": config.norm.norm_epsilon,
            "scale_attn_weights": config.attention.softmax_scale != 1.0,
            "attn_pdrop": config.attention.attention_dropout,
            "resid_pdrop": config.hidden_dropout,
            "embd_pdrop": config.hidden_dropout,
            "initializer_range": config.init.init_method_std,
            "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
        }

    def canonical(self, name: str) -> str | None:
        # Files of the plain class ``GPT2Model``, such as the first public ones, leave this out.
        full = name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"
        return None if _CONSTANT.fullmatch(full) else full

    def copies(self, config: TransformerConfig, rows: int) -> list[Copy]:
        hidden, inner = config.hidden_size, config.mlp.ffn_hidden_size
        found = [
            whole(self.token_vectors, EMBEDDING, rows, hidden),
            whole(
                "transformer.wpe.weight",
                POSITIONS,
                config.position.max_position_embeddings,
                hidden,
            ),
        ]
        for layer in range(config.num_layers):
            theirs, ours = f"transformer.h.{layer}", f"decoder.layers.{layer}"
            for norm, name in (("ln_1", "input_layernorm"), ("ln_2", "pre_mlp_layernorm")):
                found += _norm(f"{theirs}.{norm}", f"{ours}.{name}", hidden)
            found += _query_key_value(
                f"{theirs}.attn.c_attn", f"{ours}.self_attention.linear_qkv", config
            )
            for linear, name, out, into in (
                ("attn.c_proj", "self_attention.linear_proj", hidden, hidden),
                ("mlp.c_fc", "mlp.linear_fc1", inner, hidden),
                ("mlp.c_proj", "mlp.linear_fc2", hidden, inner),
            ):
                weight = (f"{theirs}.{linear}.weight", f"{ours}.{name}.weight")
                found.append(whole(*weight, out, into, transposed=True))
                found.append(whole(f"{theirs}.{linear}.bias", f"{ours}.{name}.bias", out))
        found += _norm("transformer.ln_f", FINAL_NORM, hidden)
        if config.untie_embeddings_and_output_weights:
            found.append(whole(self.head, HEAD, rows, hidden))
        return found


def _norm(theirs: str, ours: str, size: int) -> list[Copy]:
    return [whole(f"{theirs}.{part}", f"{ours}.{part}", size) for part in ("weight", "bias")]


def _query_key_value(theirs: str, ours: str, config: TransformerConfig) -> list[Copy]:
    """Return the copies of each head's rows, which are columns of theirs."""
    hidden, size = config.hidden_size, config.attention.kv_channels
    found = []
    for head in range(config.attention.num_attention_heads):
        for part in range(3):
            first = part * hidden + head * size
            start = (3 * head + part) * size
            columns, rows = (first, first + size), (start, start + size)
            weights = ((0, hidden), columns), (rows, (0, hidden))
            found += [
                Copy(f"{theirs}.weight", weights[0], f"{ours}.weight", weights[1], transposed=True),
                Copy(f"{theirs}.bias", (columns,), f"{ours}.bias", (rows,)),
            ]
    return found
