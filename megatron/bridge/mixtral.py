"""Mixtral (Jiang et al., 2024): ``MixtralForCausalLM`` of the transformers library.

A Llama whose every MLP is a set of experts. Theirs are three matrices each; ours are one tensor of
all experts for each of the two products, ``[experts, outputs, inputs]``, the gate above the value.
Weights of a token's experts are the softmax over all, made to sum to 1: that of the chosen.
"""

from collections.abc import Iterator
from typing import Any

from megatron.bridge.copies import Copy, whole
from megatron.bridge.llama import Llama
from megatron.bridge.settings import Settings
from megatron.core.transformer.config import TransformerConfig

# What its config has where a file does not say it, and Llama's has not.
_DEFAULTS = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_BIASES = ("attention_bias", "mlp_bias")


class Mixtral(Llama):
    """Rotary positions, RMSNorm, grouped queries, experts of gated MLPs with SiLU; no biases."""

    architecture = "MixtralForCausalLM"
    model_type = "mixtral"

    def from_theirs(self, settings: Settings) -> dict[str, Any]:
        for name, value in _DEFAULTS.items():
            settings.values.setdefault(name, value)
        settings.only("sliding_window", why="windows of this class are not converted yet")
        # Of training, and of what is returned besides logits.
        settings.skip("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
        width = settings.need("intermediate_size", int)
        return {
            **super().from_theirs(settings),
            "num_experts": settings.need("num_local_experts", int),
            "moe_router_topk": settings.need("num_experts_per_tok", int),
            "moe_ffn_hidden_size": width,
        }

    def misfits(self, config: TransformerConfig) -> list[str]:
        if config.moe.num_experts is None:
            return ["layers without experts"]
        return super().misfits(config)

    def to_theirs(self, config: TransformerConfig) -> dict[str, Any]:
        theirs = super().to_theirs(config)
        return {name: value for name, value in theirs.items() if name not in _BIASES} | {
            "intermediate_size": config.moe.moe_ffn_hidden_size,
            "num_local_experts": config.moe.num_experts or 0,
            "num_experts_per_tok": config.router.moe_router_topk,
            "sliding_window": None,
        }

    def channels(self, config: TransformerConfig, layer: int, kind: str) -> Iterator[Copy]:
        """Yield the router's matrix and those of each expert."""
        assert kind == "weight" and config.moe.num_experts is not None, "biases, or no experts"
        theirs, ours = f"model.layers.{layer}.block_sparse_moe", f"decoder.layers.{layer}.mlp"
        hidden, inner = config.hidden_size, config.moe.moe_ffn_hidden_size
        experts = config.moe.num_experts
        yield whole(f"{theirs}.gate.weight", f"{ours}.router.weight", experts, hidden)
        for expert in range(experts):
            for name, linear, start, shape in (
                ("w1", "linear_fc1", 0, (inner, hidden)),
                ("w3", "linear_fc1", inner, (inner, hidden)),
                ("w2", "linear_fc2", 0, (hidden, inner)),
            ):
                rows, columns = shape
                yield Copy(
                    f"{theirs}.experts.{expert}.{name}.weight",
                    ((0, rows), (0, columns)),
                    f"{ours}.experts.{linear}.weight",
                    ((expert, expert + 1), (start, start + rows), (0, columns)),
                )
