"""Layouts near one that cannot work: the parallel sizes that pass the same rules."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron.core.utils import UserError, divisors
from megatron.training.config import RunConfig
from megatron.training.layout_rules import Origins, Rule
from megatron.training.wording import flag

SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
)
SHOWN = 2
TRIED = 200
"""Layouts that are tried at most, nearest first."""


def nearest_layouts(config: RunConfig, origins: Origins, rules: Sequence[Rule]) -> str:
    """Return what to write to get the nearest layouts of the same processes that work.

    The text begins with a semicolon, to stand after a message; it is empty where none is found, and
    for one process, which has one layout.

    Args:
        config: a run whose layout breaks a rule.
        origins: where its values come from; what was derived from the sizes follows them.
        rules: what a layout must pass.
    """
    if config.process.world_size == 1:
        return ""
    found: list[str] = []
    now = _sizes(config)
    for sizes in sorted(_candidates(config), key=lambda sizes: _distance(sizes, now))[:TRIED]:
        if sizes != now and _works(_with(config, origins, sizes), origins, rules):
            changes = zip(SIZES, sizes, now, strict=True)
            found.append(
                " ".join(f"{flag(name)} {new}" for name, new, old in changes if new != old)
            )
        if len(found) == SHOWN:
            break
    if not found:
        return ""
    return f"; with {config.process.world_size} processes this works: {', or '.join(found)}"


def _sizes(config: RunConfig) -> tuple[int, ...]:
    return tuple(getattr(config.parallel, name) for name in SIZES)


def _candidates(config: RunConfig) -> Iterator[tuple[int, ...]]:
    """Yield every (tensor, pipeline, context) whose product divides the processes."""
    world = config.process.world_size
    for tp in divisors(world):
        for pp in divisors(world // tp):
            for cp in divisors(world // tp // pp):
                yield tp, pp, cp


def _distance(sizes: tuple[int, ...], now: tuple[int, ...]) -> float:
    """Return by how many doublings the sizes differ, of all axes together."""
    return sum(abs(math.log2(new / old)) for new, old in zip(sizes, now, strict=True))


def _with(config: RunConfig, origins: Origins, sizes: tuple[int, ...]) -> RunConfig:
    """Return the run with other sizes; what nobody gave is derived anew."""
    tensor, pipeline, context = sizes
    parallel = replace(
        config.parallel,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        context_parallel_size=context,
    )
    if origins["expert_tensor_parallel_size"] == "derived":
        parallel = replace(parallel, expert_tensor_parallel_size=tensor)
    config = replace(config, parallel=parallel)
    training = config.training
    if origins["global_batch_size"] == "derived" and training.step_batch_size_schedule is None:
        config = replace(
            config, training=replace(training, global_batch_size=config.samples_per_pass)
        )
    return config


def _works(config: RunConfig, origins: Origins, rules: Sequence[Rule]) -> bool:
    try:
        for rule in rules:
            rule(config, origins)
    except UserError:
        return False
    return True
