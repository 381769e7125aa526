"""The stack as data: which sub-layers stand in which layer.

The pipeline cuts this list, the model builds from it, and a dry run counts it; all without torch.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from megatron.core.transformer.config import TransformerConfig

BlockKind = Literal["self_attention", "multi_latent_attention", "mlp"]


@dataclass(frozen=True)
class SublayerPlan:
    """One block with its norm; the names are the parameters' path in the layer."""

    kind: BlockKind
    norm_name: str
    block_name: str


@dataclass(frozen=True)
class LayerPlan:
    """The sub-layers of one layer."""

    number: int
    """Position in the whole model, from 0."""
    sublayers: tuple[SublayerPlan, ...]


@lru_cache(maxsize=8)
def layer_plan(config: TransformerConfig) -> tuple[LayerPlan, ...]:
    """Return the whole stack, first layer first."""
    latent = config.mla.multi_latent_attention
    mixer: BlockKind = "multi_latent_attention" if latent else "self_attention"
    decoder = (
        SublayerPlan(mixer, "input_layernorm", "self_attention"),
        SublayerPlan("mlp", "pre_mlp_layernorm", "mlp"),
    )
    return tuple(LayerPlan(number, decoder) for number in range(config.num_layers))


def mtp_layer_plan(config: TransformerConfig, depth: int) -> LayerPlan:
    """Return the layer of a depth of multi-token prediction, from 0.

    It has the sub-layers of the decoder's last one, and what goes by number from that of its own.
    """
    return LayerPlan(depth, layer_plan(config)[-1].sublayers)
