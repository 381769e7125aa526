"""Names of weights: Megatron-core's in a checkpoint, and ours, which are those of its modules.

    in a checkpoint                                     here
    decoder.layers.mlp.linear_fc2.weight [L, ...]       decoder.layers.0.mlp.linear_fc2.weight ...
    ....self_attention.linear_qkv.layer_norm_weight     ....input_layernorm.weight
    ....mlp.linear_fc1.layer_norm_weight                ....pre_mlp_layernorm.weight
    ....self_attention.linear_q_up_proj.layer_norm_...  ....self_attention.q_layernorm....
    ....core_attention.softmax_offset                   ....softmax_offset
    ....mlp.experts.experts.linear_fc1.weight           ....mlp.experts.linear_fc1.weight
    mtp.layers.0.mtp_model_layer....                    mtp.layers.0.transformer_layer....

Layers are stacked where all are alike. A norm is named after the linear layer that follows it where
both may be one kernel: always, except that layers of multi-latent attention may keep its own name.
"""

import re
from collections.abc import Collection

STACK = "decoder.layers."
"""What names of stacked layers begin with."""

EXPERTS = "mlp.experts.experts."
"""What names of a layer's experts have in them, which are one tensor there too."""

_TO_OURS = (
    (r"\bself_attention\.linear_qkv\.layer_norm_", "input_layernorm."),
    (r"\bmlp\.linear_fc1\.layer_norm_", "pre_mlp_layernorm."),
    (r"\bself_attention\.linear_q_up_proj\.layer_norm_", "self_attention.q_layernorm."),
    (r"\bself_attention\.linear_kv_up_proj\.layer_norm_", "self_attention.kv_layernorm."),
    (r"\bcore_attention\.softmax_offset", "softmax_offset"),
    (r"\bmtp_model_layer\.", "transformer_layer."),
    (r"\bmlp\.experts\.experts\.", "mlp.experts."),
)
# What other modules keep, and what follows from flags.
_NO_WEIGHTS = re.compile(r"(\b_extra_state\b|\brotary_pos_emb\.|\brope\.)")
LINEARS = re.compile(
    r"\.(linear_proj|linear_qkv|linear_fc1|linear_fc2|linear_q_proj|linear_q_down_proj"
    r"|linear_q_up_proj|linear_kv_down_proj|linear_kv_up_proj|eh_proj"
    r"|fc1_latent_proj|fc2_latent_proj)\.weight$"
)
"""Weights beside which a checkpoint of Megatron-core has an entry ``_extra_state``."""


def is_weight(key: str) -> bool:
    """Return whether a key of Megatron's names a weight of the model."""
    return _NO_WEIGHTS.search(key) is None


def is_stacked(key: str) -> bool:
    """Return whether the first dim of a tensor counts layers."""
    return key.startswith(STACK) and not key[len(STACK) :].partition(".")[0].isdigit()


def to_ours(key: str, layer: int | None = None) -> str:
    """Return our name of a weight, or of one layer of a stacked one."""
    if layer is not None:
        key = f"{STACK}{layer}.{key[len(STACK) :]}"
    for pattern, name in _TO_OURS:
        key = re.sub(pattern, name, key)
    return key


def to_megatron(name: str, names: Collection[str]) -> tuple[str, int | None]:
    """Return the key of one of our weights, and its layer where layers are stacked.

    Args:
        name: ours.
        names: all of the model's, which tell how norms are called.
    """
    match = re.match(r"^((?:decoder\.|mtp\.layers\.\d+\.transformer_)layer)(s\.\d+)?\.(.*)$", name)
    if match is not None:
        layer = name[: -len(match.group(3))]
        name = layer + _fused(match.group(3), layer, names)
    number = re.match(rf"^{re.escape(STACK)}(\d+)\.", name)
    if number is None:
        return name, None
    return STACK + name[number.end() :], int(number.group(1))


def _fused(rest: str, layer: str, names: Collection[str]) -> str:
    rest = re.sub(
        r"^self_attention\.softmax_offset", "self_attention.core_attention.softmax_offset", rest
    )
    rest = re.sub(r"^mlp\.experts\.", EXPERTS, rest)
    if f"{layer}self_attention.linear_qkv.weight" not in names:
        return rest
    rest = re.sub(r"^input_layernorm\.", "self_attention.linear_qkv.layer_norm_", rest)
    return re.sub(r"^pre_mlp_layernorm\.", "mlp.linear_fc1.layer_norm_", rest)
