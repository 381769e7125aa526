"""The memory of a run in words: a table by pipeline rank, and what would fit."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from megatron.core.config import Origin
from megatron.core.distributed.config import STRATEGIES
from megatron.core.utils import human_bytes
from megatron.training.config import RunConfig
from megatron.training.plan.memory import MemoryPlan, RankMemory
from megatron.training.plan.savings import Savings

GIB = 2**30


def lines(
    config: RunConfig, origins: Mapping[str, Origin], padded_rows: int, memory: float
) -> Iterator[str]:
    """Yield the memory of each rank of the pipeline, by category, and what fits.

    Args:
        config: the run.
        origins: where each of its values comes from.
        padded_rows: rows of the vocabulary, padding included.
        memory: bytes of a device.
    """
    plan = MemoryPlan(config, padded_rows)
    ranks = plan.ranks()
    yield from _table(ranks)
    if config.shared_by_torch:
        yield "communication is planned as if --use-megatron-fsdp stood for --use-torch-fsdp2"
    if any(rank.building > rank.at_work for rank in ranks):
        most = max(rank.building for rank in ranks)
        yield f"the total is that of building the model ({human_bytes(most)}), before it trains"
    if config.training.skip_train:
        return
    offload = config.model.offload
    if offload.is_on and not any(rank.host for rank in ranks):
        yield (
            "activations are not offloaded: none has the elements of --min-offloaded-tensor-size "
            f"({offload.min_offloaded_tensor_size:,})"
        )
    yield from _strategies(config, padded_rows)
    yield from _micro_batches(plan, memory)
    if max(rank.total for rank in ranks) > memory:
        yield from Savings(config, origins, padded_rows).lines(memory)


def _table(ranks: Sequence[RankMemory]) -> Iterator[str]:
    """Yield a row for each run of equal ranks; categories that no rank has are left out."""
    there = {name for rank in ranks for name, size in rank.categories().items() if size}
    names = [name for name in ranks[0].categories() if name in there]
    rows = [["rank", "parameters", *names, "total"]]
    for held, numbers in groupby(range(len(ranks)), ranks.__getitem__):
        first, *others = numbers
        title = f"{first}-{others[-1]}" if others else str(first)
        sizes = held.categories()
        cells = [human_bytes(sizes[name]) for name in names]
        rows.append([title, f"{held.parameters:,}", *cells, human_bytes(held.total)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
    yield (
        "activations and communication are each at their fullest moment, the total is at the "
        "fullest of all; what operations need while they work is not in it"
    )


def _strategies(config: RunConfig, padded_rows: int) -> Iterator[str]:
    """Yield what the fullest rank has under each strategy of the replicas."""
    replicas = config.data_parallel_size * config.parallel.context_parallel_size
    shares = replicas // config.replicas.num_distributed_optimizer_instances
    if shares == 1:
        return
    mine, totals = config.replicas.data_parallel_sharding_strategy, []
    for strategy in STRATEGIES:
        chosen = replace(
            config.replicas,
            data_parallel_sharding_strategy=strategy,
            use_distributed_optimizer=False,
            use_torch_fsdp2=False,
            overlap_param_gather=False,
            num_distributed_optimizer_instances=replicas // shares if strategy != "no_shard" else 1,
        )
        plan = MemoryPlan(replace(config, replicas=chosen), padded_rows)
        totals.append(f"{strategy} {human_bytes(max(rank.total for rank in plan.ranks()))}")
    yield (
        f"--data-parallel-sharding-strategy is {mine}, over {shares} replicas; the fullest rank "
        f"would have: {', '.join(totals)}"
    )


def _micro_batches(plan: MemoryPlan, memory: float) -> Iterator[str]:
    """Yield the largest micro-batches that fit."""
    largest = plan.largest_micro_batch(memory)
    if not largest:
        yield f"no micro-batch fits {memory / GIB:g} GiB (--dry-run-memory)"
        return
    dividing = plan.largest_divisor(memory)
    yield (
        f"largest micro-batch that fits {memory / GIB:g} GiB (--dry-run-memory): about {largest} "
        f"with as many microbatches as now, {dividing or 'none'} of those that divide the global "
        "batch"
    )
