"""Layouts in words, ``tp2 sp pp2 vpp2`` or ``cp2 a2a dp2``, for tools that compare several.

tpN cpN ppN dpN     ways along each axis; what is not named is 1
sp                  sequence parallelism
vppN                N stages on each pipeline rank
gpipe ... zb-v      the schedule
p2p all_gather a2a a2a+p2p    how attention communicates along cp
overlap             gradients are summed during the backward
optim ... optim_grads_params  what replicas share out
--flag value ...    any flag of ranks, recomputation or offload, behind the words
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.core.config import flag_of, specs
from megatron.core.context_parallel.checks import KINDS
from megatron.core.context_parallel.config import ContextParallelConfig
from megatron.core.distributed.config import STRATEGIES, DataParallelConfig
from megatron.core.grid import ParallelConfig
from megatron.core.pipeline_parallel.config import PipelineConfig
from megatron.core.pipeline_parallel.layout import parse_layout as parse_stages
from megatron.core.pipeline_parallel.schedules import SCHEDULES
from megatron.core.transformer.offload_config import OffloadConfig
from megatron.core.transformer.recompute_config import RecomputeConfig
from megatron.core.utils import UserError, nearest
from megatron.training.arguments import read_settings
from megatron.training.config import RunConfig

SIZES = {
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "num_virtual_stages_per_pipeline_rank",
}
SWITCHES: Mapping[str, tuple[str, Any]] = {
    "sp": ("sequence_parallel", True),
    "overlap": ("overlap_grad_reduce", True),
    **{name: ("pipeline_schedule", name) for name in SCHEDULES},
    **{kind: ("cp_comm_type", (kind,)) for kind in KINDS},
    **{shared: ("data_parallel_sharding_strategy", shared) for shared in STRATEGIES[1:]},
    "torch_fsdp2": ("use_torch_fsdp2", True),
}
BUCKET = 2000
"""Gradients of a bucket of a small run: enough buckets that some are summed before others."""
LARGEST = 256
"""Processes, or stages of a pipeline, of a layout that a tool tries on one machine."""
NAMES = {
    name
    for owner in (ParallelConfig, PipelineConfig, ContextParallelConfig, DataParallelConfig)
    for name in specs(owner)
}
"""Settings that make a layout."""
_BEHIND = NAMES | {*specs(RecomputeConfig), *specs(OffloadConfig)}
"""Settings that may stand behind the words: the serial run gives the same without them."""


@dataclass(frozen=True)
class Layout:
    """One way to spread a run over processes."""

    text: str
    """As one writes it."""
    replicas: int
    values: Mapping[str, Any] = field(default_factory=dict)
    """Settings by name."""

    def size(self, word: str) -> int:
        """Return the ways along ``tp``, ``cp`` or ``pp``, or the stages of a rank, ``vpp``."""
        return int(self.values.get(SIZES[word], 1))

    @property
    def num_layers(self) -> int | None:
        """Return the layers of the model it is written for, if it lists them."""
        text = self.values.get("pipeline_model_parallel_layout")
        if text is None or self.size("pp") == 1:
            return None
        return sum(stage.num_layers for stage in parse_stages(text))

    @property
    def world_size(self) -> int:
        """Return the number of processes."""
        return self.replicas * self.size("tp") * self.size("cp") * self.size("pp")


SERIAL = Layout("serial", 1)


def parse_layouts(text: str, tool: str) -> list[Layout]:
    """Return the layouts that a text names, separated by semicolons.

    Args:
        text: such as ``tp2 pp2; cp2 dp2``.
        tool: name of the program, for messages.

    Raises:
        UserError: it holds a word that means nothing, or none at all.
    """
    layouts = [parse_layout(part, tool) for part in text.split(";") if part.strip()]
    if not layouts:
        raise UserError('--layouts names none; write it like "tp2 pp2; cp2 dp2"')
    return layouts


def parse_layout(text: str, tool: str) -> Layout:
    """Return the layout that a text such as ``tp2 sp pp2`` names.

    Raises:
        UserError: it holds a word that means nothing.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"--layouts: {text.strip()!r}: {error}") from None
    flags = next((at for at, word in enumerate(words) if word.startswith("--")), len(words))
    values: dict[str, Any] = {}
    for word in words[:flags]:
        name, value = _meaning(word)
        if name in values:
            raise UserError(f"--layouts: {text.strip()!r} says twice what {word} says; keep one")
        values[name] = value
    replicas = values.pop("dp", 1)
    values.update(_flags(words[flags:], tool))
    if values.get("cp_comm_type") == ("a2a+p2p",):
        levels = two_levels(values.get(SIZES["cp"], 1))
        values.setdefault("hierarchical_context_parallel_sizes", levels)
    layout = Layout(" ".join(shlex.quote(word) for word in words), replicas, values)
    stages = layout.size("pp") * layout.size("vpp")
    for count, what in ((layout.world_size, "processes"), (stages, "stages")):
        if count > LARGEST:
            raise UserError(
                f"--layouts: {text.strip()!r} has {count} {what}; at most {LARGEST} are tried on "
                "one machine"
            )
    return layout


def all_layouts(largest_world: int, num_layers: int) -> list[Layout]:
    """Return every way to share worlds of 2 to ``largest_world`` between tp, cp, pp and dp.

    Where sequence parallelism, or several stages on a rank, are possible, a second one has them.
    """
    layouts = []
    for world in range(2, largest_world + 1):
        for tp, cp, pp, dp in _factors(world, 4):
            sizes = {"tp": tp, "cp": cp, "pp": pp}
            words = [f"{word}{size}" for word, size in sizes.items() if size > 1]
            last = [f"dp{dp}"] if dp > 1 else []
            values: dict[str, Any] = {SIZES[word]: size for word, size in sizes.items()}
            layouts.append(Layout(" ".join([*words, *last]), dp, values))
            more: dict[str, Any] = {}
            if tp > 1:
                more["sequence_parallel"] = True
                words.append("sp")
            if pp > 1 and num_layers >= 2 * pp:
                more[SIZES["vpp"]] = 2
                words.append("vpp2")
            if more:
                layouts.append(Layout(" ".join([*words, *last]), dp, values | more))
    return layouts


def _meaning(word: str) -> tuple[str, Any]:
    """Return the setting that a word stands for; ``dp`` is none of a run's."""
    if word in SWITCHES:
        return SWITCHES[word]
    match = re.fullmatch(r"([a-z]+)(\d+)", word)
    if match is not None and match[1] in (*SIZES, "dp"):
        if not 1 <= int(match[2][:10]) <= LARGEST:
            raise UserError(f"--layouts: {word}: a size must be at least 1, and at most {LARGEST}")
        return SIZES.get(match[1], "dp"), int(match[2])
    known = [*(f"{name}N" for name in (*SIZES, "dp")), *SWITCHES]
    near = nearest(word, known, 1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise UserError(
        f"--layouts: {word!r} means nothing here{hint}; the words are {', '.join(known)}, with "
        "flags of a run behind them"
    )


def _flags(words: Sequence[str], tool: str) -> Mapping[str, Any]:
    """Return the settings of flags behind the words."""
    values = read_settings(words, tool).values
    for name in values:
        if name not in _BEHIND:
            raise UserError(
                f"--layouts: {flag_of(RunConfig, name)} is no matter of a layout, and the serial "
                "run would not have it; give it to the whole command"
            )
    return values


def two_levels(size: int, inner: int = 1) -> tuple[int, int]:
    """Return two factors of a size: ``inner`` first if it is one above 1, else the least there is.

    >>> two_levels(12), two_levels(12, 4), two_levels(9, 4)
    ((2, 6), (4, 3), (3, 3))
    """
    if inner == 1 or size % inner:
        inner = next((n for n in range(2, size + 1) if size % n == 0), 1)
    return inner, size // inner


def _factors(number: int, count: int) -> Iterator[Sequence[int]]:
    """Yield every ordered way to write ``number`` as a product of ``count`` factors."""
    if count == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in _factors(number // first, count - 1):
                yield (first, *rest)
