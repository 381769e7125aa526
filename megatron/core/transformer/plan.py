"""The stack as data: which sub-layers stand in which layer.

The pipeline cuts this list, the model builds from it, and a dry run counts it; all without torch.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from megatron.core.transformer.config import TransformerConfig

BlockKind = Literal["self_attention", "multi_latent_attention", "mlp", "moe"]


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
    attention = SublayerPlan(mixer, "input_layernorm", "self_attention")
    dense = (attention, SublayerPlan("mlp", "pre_mlp_layernorm", "mlp"))
    experts = (attention, SublayerPlan("moe", "pre_mlp_layernorm", "mlp"))
    return tuple(
        LayerPlan(number, experts if config.moe.layer_has_experts(number) else dense)
        for number in range(config.num_layers)
    )


def mtp_layer_plan(config: TransformerConfig, depth: int) -> LayerPlan:
    """Return the layer of a depth of multi-token prediction, from 0.

    It has the sub-layers of the decoder's last one, and what goes by number from that of its own.
    """
    return LayerPlan(depth, layer_plan(config)[-1].sublayers)


def routers_of(config: TransformerConfig) -> tuple[int, ...]:
    """Return the numbers of layers that have experts.

    Those of multi-token prediction come after the decoder's.
    """
    ahead = (mtp_layer_plan(config, depth) for depth in range(config.mtp.depths))
    layers = (*layer_plan(config), *ahead)
    return tuple(
        number
        for number, layer in enumerate(layers)
        if any(part.kind == "moe" for part in layer.sublayers)
    )


def loss_pieces(sequence: int, samples: int, rows: int, *, limit: int) -> int:
    """Return in how many pieces of the sequence head and loss work.

    Args:
        sequence: positions whose logits a rank makes, of each sample.
        samples: of a microbatch.
        rows: of the vocabulary on a rank.
        limit: logits that may exist at once; 0 for all.
    """
    if not limit:
        return 1
    return min(sequence, max(1, -(-sequence * samples * rows // limit)))
