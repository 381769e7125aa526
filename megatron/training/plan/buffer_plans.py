"""The flat buffers that parameters and gradients of a rank lie in, from configs alone."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron.core.distributed.layout import BufferPlan, Item, plan_buffers, unit_of
from megatron.core.distributed.rows import plan_rows
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.groups import grouping
from megatron.core.pipeline_parallel.stages import Stage
from megatron.training.config import RunConfig
from megatron.training.plan.parameter_shapes import BIASES, ParameterShape, stage_parameters


class BufferKey(NamedTuple):
    """What parameters of one buffer have in common; all are of one dtype."""

    summed: tuple[str, ...]
    alone: str
    """Name of the parameter that has a buffer of its own; empty elsewhere."""
    tied: bool
    unit: str
    """Part of the model that has buffers of its own; empty where gradients are not shared out."""
    expert: bool = False
    """Its replicas are those of experts."""


def replicas_of(config: RunConfig, plan: BufferPlan) -> int:
    """Return the ranks that sum the gradients of a buffer."""
    assert isinstance(plan.key, BufferKey)
    return config.axis_sizes["edp" if plan.key.expert else "dp_cp"]


def shares_of(config: RunConfig, plan: BufferPlan) -> int:
    """Return into how many shares these divide it; 1 for none."""
    assert isinstance(plan.key, BufferKey)
    return config.expert_shares if plan.key.expert else config.shares


def buffer_items(
    parameters: Sequence[ParameterShape],
    optimizer: OptimizerConfig | None = None,
    *,
    by_unit: bool = False,
) -> list[Item]:
    """Return parameters as what buffers are planned from; the same ones share a buffer in a run.

    Args:
        parameters: of one chunk of the model, in its order.
        optimizer: whose groups order and part buffers; the default one when absent.
        by_unit: each unit of the model has buffers of its own.
    """
    items, group_of = [], grouping(optimizer or OptimizerConfig.resolve())
    for p in parameters:
        unit = unit_of(p.name) if by_unit else ""
        key = BufferKey(p.summed, p.name if p.tied or p.apart else "", p.tied, unit, p.expert)
        items.append(Item(p.name, p.numel, key, group_of(p.traits), p.shape[0]))
    return items


def chunk_parameters(
    config: RunConfig, padded_rows: int, pp_rank: int, ways: int | None = None
) -> list[list[ParameterShape]]:
    """Return the parameters of a rank of the pipeline, for each chunk of the model.

    Args:
        config: the run.
        padded_rows: rows of the vocabulary, padding included.
        pp_rank: its coordinate.
        ways: ranks that share a matrix, of the dense layers and of experts; the run's when absent.
    """
    parallel, stages = config.parallel, config.stages
    tp, etp = parallel.tensor_model_parallel_size, parallel.expert_tensor_parallel_size
    if ways is not None:
        tp = etp = ways
    expert_ways = (parallel.expert_model_parallel_size, etp)

    def of(stage: Stage) -> Iterator[ParameterShape]:
        return stage_parameters(
            config.model,
            padded_rows,
            stage,
            tp,
            sequence_parallel=parallel.sequence_parallel,
            expert_ways=expert_ways,
        )

    chunks = [[*of(stages[at])] for at in config.placement.positions(pp_rank)]
    if len(chunks) == 1:
        return chunks
    # Learned biases by distance are one for all chunks.
    first, *others = chunks
    first = [replace(p, apart=p.apart or BIASES in p.name) for p in first]
    return [first, *([p for p in chunk if BIASES not in p.name] for chunk in others)]


def chunk_buffers(config: RunConfig, padded_rows: int, pp_rank: int) -> list[list[BufferPlan]]:
    """Return the gradient buffers of a rank, with their buckets, for each chunk of the model."""
    chunks = []
    by_torch, sizes = config.shared_by_torch, config.axis_sizes
    by_unit = config.replicas.shards_gradients and config.shares > 1 and not by_torch
    for chunk in chunk_parameters(config, padded_rows, pp_rank):
        held = [p for p in chunk if p.trained]
        if by_torch:
            items = buffer_items(held, config.optimizer)
            chunks.append(plan_rows(items, config.shares))
            continue
        size = config.replicas.bucket_size(sum(p.numel for p in held), sizes["dp_cp"])
        plans: list[BufferPlan] = []
        for experts, replicas, shares in (
            (False, sizes["dp_cp"], config.shares),
            (True, sizes["edp"], config.expert_shares),
        ):
            mine = [p for p in held if p.expert == experts]
            items = buffer_items(mine, config.optimizer, by_unit=by_unit)
            plans += plan_buffers(items, replicas, size, shares=shares)
        chunks.append(plans)
    return chunks
