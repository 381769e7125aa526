"""Optimizer groups: which parameters are updated with which settings.

A parameter's group follows from its `Sharding` record alone. Matrices and embeddings are decayed;
biases, norms and other vectors are not.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from megatron.core.distributed.buffers import FlatBuffer, GroupOf
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.sharding import Sharding
from megatron.core.utils import human_count


@dataclass(frozen=True)
class Settings:
    """What one group's update takes at one iteration."""

    lr: float
    weight_decay: float


def grouping(config: OptimizerConfig) -> GroupOf:
    """Return the function that gives a parameter's group."""

    def group_of(record: Sharding) -> str:
        decays = record.decay or (config.apply_wd_to_qk_layernorm and record.qk_norm)
        return "decay" if decays else "no_decay"

    return group_of


def settings(lr: float, weight_decay: float) -> dict[str, Settings]:
    """Return the settings of every group."""
    return {"decay": Settings(lr, weight_decay), "no_decay": Settings(lr, 0.0)}


def describe(buffers: Iterable[FlatBuffer]) -> list[str]:
    """Return one line per group: which parameters of this rank it updates, and their elements.

    Numbers in names are shown as ``*``, so that the layers of a model share a name.
    """
    found: dict[str, list[tuple[int, str, int]]] = {}
    for buffer in buffers:
        for slot in buffer.plan.slots:
            name = re.sub(r"\b\d+\b", "*", slot.name)
            members = found.setdefault(buffer.plan.group_of(slot), [])
            members.append((slot.index, name, slot.stop - slot.start))
    lines = []
    for group, members in sorted(found.items()):
        names = dict.fromkeys(name for _, name, _ in sorted(members))
        total = human_count(sum(numel for _, _, numel in members))
        lines.append(
            f"optimizer group {group}: {len(members)} parameters, {total} elements: "
            + ", ".join(names)
        )
    return lines
