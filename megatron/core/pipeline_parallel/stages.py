"""Which part of a model a pipeline stage owns; plain Python, so that a plan needs no torch."""

from dataclasses import dataclass

from megatron.core.utils import UserError


@dataclass(frozen=True)
class Stage:
    """One contiguous share of the layer stack, with or without its ends."""

    layers: range
    """Layer numbers in the whole model, from 0."""
    is_first: bool = True
    """Owns the embedding."""
    is_last: bool = True
    """Owns the final norm and the output head."""


def split_layers(num_layers: int, num_stages: int) -> list[range]:
    """Return the layers of each stage: contiguous, and as even as can be.

    Where they do not divide evenly, earlier stages get one more.

    Raises:
        UserError: there are fewer layers than stages.
    """
    if num_layers < num_stages:
        raise UserError(
            f"--num-layers ({num_layers}) must be at least --pipeline-model-parallel-size "
            f"({num_stages}); lower the latter to {num_layers} or less"
        )
    size, extra = divmod(num_layers, num_stages)
    starts = [stage * size + min(stage, extra) for stage in range(num_stages + 1)]
    return [range(start, stop) for start, stop in zip(starts, starts[1:], strict=False)]


def make_stages(num_layers: int, num_stages: int) -> list[Stage]:
    """Return every stage of a pipeline."""
    return [
        Stage(layers, is_first=index == 0, is_last=index == num_stages - 1)
        for index, layers in enumerate(split_layers(num_layers, num_stages))
    ]
