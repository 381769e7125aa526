"""Whether two values of a setting make one model: they may be written in several ways.

layer patterns   N and a number for each layer, where they name the same layers
balancing        sinkhorn weighs experts by a softmax over all of them, every other kind by the
                 score function; among the others only losses differ
YaRN's context   means something where positions are YaRN's; elsewhere it follows the sequence
"""

from collections.abc import Mapping
from typing import Any

from megatron.core.config import as_json

BALANCING = "moe_router_load_balancing_type"
"""A setting that is changeable, but for the way in which experts are weighed."""


def same(name: str, here: Any, stored: Any, config: Mapping[str, Any]) -> bool:
    """Return whether a setting means the same.

    Args:
        name: of the setting.
        here: a value.
        stored: another; a JSON list stands for a tuple.
        config: flat settings that say how many layers there are.
    """
    here, stored = as_json(here), as_json(stored)
    if name == BALANCING:
        has_experts = config.get("num_experts") is not None
        return not has_experts or ("sinkhorn" in here) == ("sinkhorn" in stored)
    if name == "yarn_original_max_position_embeddings":
        return bool(here == stored) or config.get("position_embedding_type", "yarn") != "yarn"
    layers = (config.get("num_layers") or 0) + (config.get("decoder_num_layers") or 0)
    return bool(here == stored or _pattern(name, here, layers) == _pattern(name, stored, layers))


def _pattern(name: str, value: Any, layers: int) -> Any:
    """Return the number of each layer that a frequency stands for; other values as they are."""
    if value is not None and (not isinstance(value, int) or value < 1):
        return value
    match name:
        case "moe_layer_freq" if value is not None:
            return [int(layer % value == 0) for layer in range(layers)]
        case "window_attn_skip_freq":
            return [int(value is None or (layer + 1) % value != 0) for layer in range(layers)]
        case "no_rope_freq":
            return [int(value is not None and (layer + 1) % value == 0) for layer in range(layers)]
    return value
