"""The layout that a run's own flags make, for a small run that has fewer layers.

Ways along the axes, schedule and kinds of communication are taken as they are. Of stages that hold
different numbers of layers, whichever flag says so, the order is kept: the least loaded get one
layer (none where they have none), those with the next larger number two, and so on. Of 32 layers as
7 9 9 7 that leaves 6 as 1 2 2 1. Sizes that mean nothing in a small run are lowered; what cannot be
kept is named.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.config import as_words, flag_of, specs
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.pipeline_parallel.config import PipelineConfig
from megatron.core.pipeline_parallel.layout import FLAG as LAYOUT
from megatron.core.pipeline_parallel.stages import Stage
from megatron.core.utils import UserError
from megatron.training.config import RunConfig
from megatron.training.verification.layout_words import BUCKET, NAMES, SIZES, SWITCHES, Layout

MOST_PROCESSES = 16
"""Of a layout that nobody named."""
_GROUP = "microbatch_group_size_per_vp_stage"
_INSTANCES = "num_distributed_optimizer_instances"
_REWRITTEN = {
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
    _GROUP,
    "ddp_bucket_size",
}
"""Settings of a layout that are numbers of layers, microbatches and elements."""


@dataclass(frozen=True)
class OwnLayout:
    """A run's own layout as a small run has it."""

    layout: Layout
    smaller: tuple[str, ...] = ()
    """What stands for what, as one may read it."""
    left_out: tuple[str, ...] = ()
    """Flags that the small run does not have, each with the reason."""


def own_layout(values: Mapping[str, Any]) -> OwnLayout | None:
    """Return the layout that a run's own flags make, with two replicas where that is small enough.

    None for a run without a layout.

    Args:
        values: what the user gave, by name.

    Raises:
        UserError: its layers cannot be split so, or it has more processes than a machine should
            start for this.
    """
    mine = {name: value for name, value in values.items() if name in NAMES - _REWRITTEN}
    smaller = _pipeline(values, mine)
    size = values.get("ddp_bucket_size")
    if size is not None:
        mine["ddp_bucket_size"] = min(size, BUCKET)
        if size > BUCKET:
            smaller.append(f"{flag_of(RunConfig, 'ddp_bucket_size')} {BUCKET} ({size})")
    replicas = DataParallelConfig.resolve(**_given(values, DataParallelConfig))
    shown = dict(mine)
    if not replicas.use_torch_fsdp2:  # a word of its own
        shown["data_parallel_sharding_strategy"] = replicas.data_parallel_sharding_strategy
    words = [f"{word}{mine[name]}" for word, name in SIZES.items() if mine.get(name, 1) > 1]
    words += [word for word, (name, value) in SWITCHES.items() if shown.get(name) == value]
    alone = Layout(" ".join(words), 1, mine)
    if alone.world_size > MOST_PROCESSES:
        raise UserError(
            f"the layout of these flags ({alone.text}) has {alone.world_size} processes, more "
            f"than {MOST_PROCESSES}: name a smaller one with the same words, such as --layouts "
            f'"{" ".join(re.sub(r"[0-9]+", "2", word) for word in words)}"'
        )
    if not words:
        return None
    ways = _replicas(alone, replicas.num_distributed_optimizer_instances)
    left_out = []
    if ways == 1 and alone.values.get(_INSTANCES, 1) > 1:
        left_out.append(f"{flag_of(RunConfig, _INSTANCES)} {mine.pop(_INSTANCES)}: one replica")
    words += [f"dp{ways}"] if ways > 1 else []
    if "pipeline_model_parallel_layout" in mine:
        words += [LAYOUT, shlex.quote(mine["pipeline_model_parallel_layout"])]
    return OwnLayout(Layout(" ".join(words), ways, mine), tuple(smaller), tuple(left_out))


def _pipeline(values: Mapping[str, Any], mine: dict[str, Any]) -> list[str]:
    """Add to `mine` how the stages of a small run are made; return what is smaller."""
    ranks, mtp = values.get(SIZES["pp"], 1), values.get("mtp_num_layers") or 0
    pipeline = PipelineConfig.resolve(**_given(values, PipelineConfig))
    stages = pipeline.stages(values.get("num_layers", 1), ranks, mtp)
    chunks = len(stages) // ranks
    counts = [len(stage.layers) for stage in stages]
    smaller = []
    if len(set(counts)) > 1:
        fewer = _fewer(counts)
        mine["pipeline_model_parallel_layout"] = layout_text(stages, fewer)
        if fewer != counts:
            smaller.append(f"layers of the stages {as_words(fewer)} ({as_words(counts)})")
    elif chunks > 1:
        mine[SIZES["vpp"]] = chunks
    group = values.get(_GROUP)
    if group is not None and chunks > 1:
        # A small run has 2 x ranks microbatches in an iteration: more than one group of them.
        mine[_GROUP] = max(ranks, min(group, 2 * ranks - 1))
        if mine[_GROUP] != group:
            smaller.append(f"{flag_of(RunConfig, _GROUP)} {mine[_GROUP]} ({group})")
    return smaller


def layout_text(stages: Sequence[Stage], counts: Sequence[int]) -> str:
    """Return Megatron's layout string of stages with these numbers of layers.

    >>> layout_text([Stage(range(3), True, False), Stage(range(3, 4), False, True)], [2, 1])
    'Ett|tL'
    """
    return "|".join(
        "E" * stage.is_first + "t" * count + "m" * stage.num_mtp_layers + "L" * stage.is_last
        for stage, count in zip(stages, counts, strict=True)
    )


def _fewer(counts: Sequence[int]) -> list[int]:
    """Return the place of each number among the different ones, from 1; of 0 that is 0.

    >>> _fewer([7, 9, 9, 0, 7])
    [1, 2, 2, 0, 1]
    """
    places = {count: place for place, count in enumerate(sorted({0, *counts}))}
    return [places[count] for count in counts]


def _replicas(alone: Layout, instances: int) -> int:
    """Return the replicas of a small run: two for each instance of the optimizer, or as may be."""
    for replicas in (2 * instances, instances, 2):
        groups, rest = divmod(replicas * alone.size("cp"), instances)
        if groups > 1 and not rest and replicas * alone.world_size <= MOST_PROCESSES:
            return replicas
    return 1


def _given(values: Mapping[str, Any], owner: type[Any]) -> dict[str, Any]:
    return {name: values[name] for name in specs(owner) if name in values}
