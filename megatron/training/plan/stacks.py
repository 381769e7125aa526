"""Stacks of layers as a plan sees them: which positions a layer works on, and how units are named.

Layers are numbered through: an encoder's, then its decoder's, or those of the one stack.
"""

from collections.abc import Sequence

from megatron.core.transformer.config import TransformerConfig
from megatron.training.config import RunConfig


def lengths(config: RunConfig) -> tuple[int, ...]:
    """Return the positions of a sample's texts: the encoder's and the decoder's, or the one's."""
    more = config.data.t5.decoder_seq_length
    return (config.data.seq_length,) if more is None else (config.data.seq_length, more)


def length(config: RunConfig, layer: int) -> int:
    """Return the positions of a sample that a layer works on, from its number."""
    return lengths(config)[-1 if is_decoders(config.model, layer) else 0]


def is_decoders(model: TransformerConfig, layer: int) -> bool:
    """Return whether a layer is of the stack called ``decoder``, as that of a lone stack is."""
    return not model.has_two_stacks or layer >= model.num_layers


def name(model: TransformerConfig, layer: int) -> str:
    """Return the path of a layer in the model; its parameters are one unit."""
    if not is_decoders(model, layer):
        return f"encoder.layers.{layer}"
    return f"decoder.layers.{layer - model.num_layers if model.has_two_stacks else layer}"


def of(model: TransformerConfig, layers: range) -> list[range]:
    """Return a stage's layers by stack, the encoder's first; a stack without any is left out."""
    first = model.num_layers if model.has_two_stacks else layers.start
    first = min(max(first, layers.start), layers.stop)
    return [part for part in (range(layers.start, first), range(first, layers.stop)) if part]


def units_made_again(model: TransformerConfig, layers: range) -> list[Sequence[int]]:
    """Return a stage's layers that are recomputed as a whole, by unit; none has two stacks'."""
    return [unit for stack in of(model, layers) for unit in model.recompute.units(stack)]
