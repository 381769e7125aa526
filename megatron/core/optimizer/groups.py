"""Optimizer groups: which parameters are updated with which settings.

A parameter's group follows from its `Sharding` record alone. Matrices and embeddings are decayed;
biases, norms and other vectors are not.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from megatron.core import sharding
from megatron.core.distributed.buffers import FlatBuffer, by_decay
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.sharding import Sharding
from megatron.core.utils import human_count

_QK_NORM = re.compile(r"(^|\.)(q|k)_layernorm\.weight$")


@dataclass(frozen=True)
class Settings:
    """What one group's update takes at one iteration."""

    lr: float
    weight_decay: float


def grouping(config: OptimizerConfig) -> Callable[[Sharding], str]:
    """Return the function that gives a parameter's group."""

    def group_of(record: Sharding) -> str:
        if config.apply_wd_to_qk_layernorm and _QK_NORM.search(record.name):
            return "decay"
        return by_decay(record)

    return group_of


def settings(lr: float, weight_decay: float) -> dict[str, Settings]:
    """Return the settings of every group."""
    return {"decay": Settings(lr, weight_decay), "no_decay": Settings(lr, 0.0)}


def describe(buffers: Iterable[FlatBuffer]) -> list[str]:
    """Return one line per group: how many parameters and elements of this rank it updates."""
    counts: dict[str, list[int]] = {}
    for buffer in buffers:
        for slot in buffer.plan.slots:
            group = buffer.plan.group_of(slot)
            count = counts.setdefault(group, [0, 0])
            count[0] += 1
            count[1] += slot.stop - slot.start
    return [
        f"optimizer group {group}: {tensors} parameters, {human_count(numel)} elements"
        for group, (tensors, numel) in sorted(counts.items())
    ]


def members(buffers: Iterable[FlatBuffer]) -> dict[str, list[str]]:
    """Return the parameter names of each group, in the model's order."""
    found: dict[str, list[tuple[int, str]]] = {}
    for buffer in buffers:
        for slot, parameter in zip(buffer.plan.slots, buffer.parameters, strict=True):
            name = sharding.of(parameter).name
            found.setdefault(buffer.plan.group_of(slot), []).append((slot.index, name))
    return {group: [name for _, name in sorted(names)] for group, names in found.items()}
