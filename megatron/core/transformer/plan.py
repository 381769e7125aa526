"""The stack as data: which sub-layers stand in which layer.

The pipeline cuts this list, the model builds from it, and a dry run counts it; all without torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from megatron.core.transformer.config import TransformerConfig

BlockKind = Literal[
    "self_attention",
    "multi_latent_attention",
    "cross_attention",
    "mlp",
    "moe",
]
"""Cross-attention looks at what an encoder gave."""


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
    name: str
    """Position in its stack, by which its parameters are named."""
    sublayers: tuple[SublayerPlan, ...]


_BEFORE = "input_layernorm", "self_attention"
_MLP = SublayerPlan("mlp", "pre_mlp_layernorm", "mlp")
ENCODER_LAYER = (SublayerPlan("self_attention", *_BEFORE), _MLP)
DECODER_LAYER = (
    SublayerPlan("self_attention", *_BEFORE),
    SublayerPlan("cross_attention", "pre_cross_attn_layernorm", "cross_attention"),
    _MLP,
)
"""Of a decoder that has an encoder."""


@lru_cache(maxsize=8)
def layer_plan(config: TransformerConfig) -> tuple[LayerPlan, ...]:
    """Return all layers, first one first: an encoder's, then its decoder's, or the one stack's."""
    if config.has_two_stacks:
        return (*encoder_plan(config), *decoder_plan(config))
    latent = config.mla.multi_latent_attention
    mixer: BlockKind = "multi_latent_attention" if latent else "self_attention"
    attention = SublayerPlan(mixer, *_BEFORE)
    dense = (attention, _MLP)
    experts = (attention, SublayerPlan("moe", "pre_mlp_layernorm", "mlp"))
    return tuple(
        LayerPlan(number, str(number), experts if config.moe.layer_has_experts(number) else dense)
        for number in range(config.num_layers)
    )


def encoder_plan(config: TransformerConfig) -> tuple[LayerPlan, ...]:
    """Return the layers of an encoder, whose tokens see one another both ways."""
    return tuple(
        LayerPlan(number, str(number), ENCODER_LAYER) for number in range(config.num_layers)
    )


def decoder_plan(config: TransformerConfig) -> tuple[LayerPlan, ...]:
    """Return the layers of a decoder with an encoder, which come after that's."""
    return tuple(
        LayerPlan(number, str(number - config.num_layers), DECODER_LAYER)
        for number in range(config.num_layers, config.all_layers)
    )


def mtp_layer_plan(config: TransformerConfig, depth: int) -> LayerPlan:
    """Return the layer of a depth of multi-token prediction, from 0.

    It has the sub-layers of the decoder's last one, and what goes by number from that of its own.
    """
    return LayerPlan(depth, str(depth), layer_plan(config)[-1].sublayers)


def routers_of(config: TransformerConfig) -> tuple[int, ...]:
    """Return the numbers of layers that have experts.

    Those of multi-token prediction come after the decoder's.
    """
    return tuple(number for number, _ in _with_experts(config))


def judged_routers_of(config: TransformerConfig) -> tuple[int, ...]:
    """Return those of `routers_of` that choose by score, not by token id.

    Only their choices can be balanced, by a loss or by a bias.
    """
    hashed = config.router.moe_n_hash_layers
    return tuple(number for number, layer in _with_experts(config) if layer.number >= hashed)


def _with_experts(config: TransformerConfig) -> Iterator[tuple[int, LayerPlan]]:
    """Yield the layers that have experts, each with its number in the whole model."""
    ahead = (mtp_layer_plan(config, depth) for depth in range(config.mtp.depths))
    for number, layer in enumerate((*layer_plan(config), *ahead)):
        if any(part.kind == "moe" for part in layer.sublayers):
            yield number, layer


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
