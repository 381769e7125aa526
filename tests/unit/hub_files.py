"""Folders as the transformers library writes them, of random values, made without it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 21,
    "hidden_size": 12,
    "intermediate_size": 10,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 21,
    "n_embd": 12,
    "n_head": 3,
    "n_layer": 2,
    "n_positions": 16,
}


def llama_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a Llama without biases, from its class's definition."""
    hidden, inner, vocab = (
        config[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    )
    size = hidden // config["num_attention_heads"]
    keys = config["num_key_value_heads"] * size
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        shapes |= {
            f"{name}.input_layernorm.weight": (hidden,),
            f"{name}.post_attention_layernorm.weight": (hidden,),
            f"{name}.self_attn.q_proj.weight": (hidden, hidden),
            f"{name}.self_attn.k_proj.weight": (keys, hidden),
            f"{name}.self_attn.v_proj.weight": (keys, hidden),
            f"{name}.self_attn.o_proj.weight": (hidden, hidden),
            f"{name}.mlp.gate_proj.weight": (inner, hidden),
            f"{name}.mlp.up_proj.weight": (inner, hidden),
            f"{name}.mlp.down_proj.weight": (hidden, inner),
        }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def gpt2_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a tied GPT-2 as its first public files have them."""
    hidden, vocab = config["n_embd"], config["vocab_size"]
    shapes = {"wte.weight": (vocab, hidden), "wpe.weight": (config["n_positions"], hidden)}
    for layer in range(config["n_layer"]):
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"h.{layer}.{norm}.{kind}": (hidden,) for kind in ("weight", "bias")}
        for name, into, out in (
            ("attn.c_attn", hidden, 3 * hidden),
            ("attn.c_proj", hidden, hidden),
            ("mlp.c_fc", hidden, 4 * hidden),
            ("mlp.c_proj", 4 * hidden, hidden),
        ):
            shapes[f"h.{layer}.{name}.weight"] = (into, out)
            shapes[f"h.{layer}.{name}.bias"] = (out,)
        # The mask was stored as well.
        shapes[f"h.{layer}.attn.bias"] = (1, 1, config["n_positions"], config["n_positions"])
    return shapes | {"ln_f.weight": (hidden,), "ln_f.bias": (hidden,)}


def random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int = 3) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """Write config.json and one safetensors file."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


def write_llama(folder: Path, **settings: Any) -> Path:
    config = LLAMA | settings
    return write_folder(folder, config, random_tensors(llama_shapes(config)))


def write_gpt2(folder: Path, **settings: Any) -> Path:
    config = GPT2 | settings
    return write_folder(folder, config, random_tensors(gpt2_shapes(config)))
