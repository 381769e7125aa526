"""Which stacks of layers a model has: a decoder alone, or an encoder and a decoder."""

from collections.abc import Mapping
from typing import Any

from megatron.core.config import Config, check_at_least, check_at_most, option
from megatron.core.transformer.layer_pattern import MOST_LAYERS


class StacksConfig(Config):
    """The second stack of a model, if it has one."""

    decoder_num_layers: int | None = option(
        derived="--num-layers with --decoder-seq-length, else no decoder beside the one stack"
    )
    """Layers of an encoder-decoder's decoder; its encoder has --num-layers."""

    @classmethod
    def derive(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Let samples for a decoder be read by one, as deep as the encoder."""
        two = values.get("decoder_seq_length") is not None
        return {"decoder_num_layers": values["num_layers"] if two else None}

    def __post_init__(self) -> None:
        check_at_least(self, 1, "decoder_num_layers")
        check_at_most(self, MOST_LAYERS, "decoder_num_layers")
