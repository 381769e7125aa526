"""What sums of gradients and gathers of weights move, in closed form.

`traffic` has the whole of an iteration. With P elements of a buffer, padding included, R ranks that
share it out, g the bytes in which gradients travel, w those of a weight and m the microbatches of a
replica, an iteration moves over ``dp_cp`` (``dp_inner`` where there are several instances of the
optimizer), of every buffer:

    no_shard              all_reduce      1 x P g
    optim                 reduce_scatter  1 x P g         for every bucket
                          all_gather      1 x P w
    optim_grads           reduce_scatter  m x P g         for every chunk that uses it
                          all_gather      1 x P w
    optim_grads_params    reduce_scatter  m x P g         for every chunk that uses it
                          all_gather      m x P w         for every use by a unit, in forward
                          all_gather      m x P w         for every chunk that uses it, in backward

Experts' buffers move the same over ``edp`` (``edp_inner``), with its ranks for R; one replica moves
nothing, and those alone in their instance share nothing, whatever the strategy (no_shard).

An evaluation gathers as forwards do. Recomputed units of several layers gather all of them but the
last once more in backward. Instances add their shares up, P / R elements, by an all-reduce over
``dp_outer``, or ``edp_outer``. Sums of regions, over ``tp``, ``kv_replica`` and ``ends``, are of a
rank's own share.

What torch's ``fully_shard`` moves is in `traffic_torch`.
"""

from collections.abc import Iterator, Mapping

from megatron.core.distributed.layout import BufferPlan
from megatron.core.distributed.ranges import intersect
from megatron.core.optimizer.memory import BYTES
from megatron.core.pipeline_parallel.stages import Stage
from megatron.core.utils import divide
from megatron.training.config import RunConfig
from megatron.training.plan import stacks, traffic_torch
from megatron.training.plan.buffer_plans import BufferKey, chunk_buffers, shares_of
from megatron.training.plan.parameter_shapes import BIASES
from megatron.training.plan.traffic_passes import Book


def add_sums(
    book: Book, config: RunConfig, padded_rows: int, count: int, coordinates: Mapping[str, int]
) -> None:
    """Add the sums of gradients and the gathers of new weights of one iteration."""
    replicas = config.replicas
    if config.shared_by_torch:
        traffic_torch.add_sums(book, config, padded_rows, count)
        for plan, _ in _buffers(config, padded_rows, coordinates["pp"]):
            share = divide(plan.size, config.shares)
            book.add("dp_outer", "all_reduce", share * _kept(config))
            _add_regions(book, config, plan, share_of(config, coordinates))
        add_gathers(book, config, padded_rows, count, coordinates["pp"], trains=True)
        return
    travelling = BYTES[config.precision.reduce_dtype]
    for plan, uses in _buffers(config, padded_rows, coordinates["pp"]):
        (axis, outer), shares = _sharing_axes(config, plan), shares_of(config, plan)
        assert isinstance(plan.key, BufferKey)
        for start, stop in plan.buckets:
            size = (stop - start) * travelling
            if shares == 1:
                book.add("edp" if plan.key.expert else "dp_cp", "all_reduce", size)
                continue
            times = count * len(uses) if replicas.shards_gradients else 1
            book.add(axis, "reduce_scatter", size, times)
            if outer is not None:
                book.add(outer, "all_reduce", divide(stop - start, shares) * _kept(config))
            if not replicas.shards_weights:
                weights = BYTES[config.precision.params_dtype]
                book.add(axis, "all_gather", (stop - start) * weights)
        _add_regions(book, config, plan, share_of(config, coordinates))
    add_gathers(book, config, padded_rows, count, coordinates["pp"], trains=True)


def add_gathers(
    book: Book, config: RunConfig, padded_rows: int, count: int, pp_rank: int, *, trains: bool
) -> None:
    """Add the gathers of weights that are shared out, for the passes of ``count`` microbatches."""
    if config.shares == 1 or not config.replicas.shards_weights:
        return
    if config.shared_by_torch:
        traffic_torch.add_gathers(book, config, padded_rows, count, trains=trains)
        return
    weights = BYTES[config.precision.params_dtype]
    again = {stacks.name(config.model, layer) for layer in _recomputed_early(config, pp_rank)}
    for plan, uses in _buffers(config, padded_rows, pp_rank):
        assert isinstance(plan.key, BufferKey)
        times = sum(uses)
        if trains:
            times += sum(map(bool, uses)) + (plan.key.unit in again)
        if shares_of(config, plan) > 1:
            axis, _ = _sharing_axes(config, plan)
            book.add(axis, "all_gather", plan.size * weights, count * times)


def _sharing_axes(config: RunConfig, plan: BufferPlan) -> tuple[str, str | None]:
    """Return the axis over which a buffer is shared out, and that of ranks with equal shares."""
    assert isinstance(plan.key, BufferKey)
    several = config.replicas.num_distributed_optimizer_instances > 1
    if plan.key.expert:
        return ("edp_inner", "edp_outer") if several else ("edp", None)
    return traffic_torch.sharing_axis(config), "dp_outer" if several else None


def share_of(config: RunConfig, coordinates: Mapping[str, int], *, experts: bool = False) -> int:
    """Return which share a rank has: ``cp`` varies faster than ``dp`` along ``dp_cp``."""
    if experts:
        return coordinates.get("edp", 0) % config.expert_shares
    along_cp = config.parallel.context_parallel_size
    place = coordinates.get("dp", 0) * along_cp + coordinates.get("cp", 0)
    return place % config.shares


def _kept(config: RunConfig) -> int:
    precision = config.precision
    return BYTES[precision.main_dtype if config.shared_by_torch else precision.grad_dtype]


def _add_regions(book: Book, config: RunConfig, plan: BufferPlan, coordinate: int) -> None:
    """Add what completes the gradients of a rank's share of a buffer."""
    size, attention = _kept(config), config.model.attention
    heads = attention.num_attention_heads // config.parallel.tensor_model_parallel_size
    assert isinstance(plan.key, BufferKey)
    share = divide(plan.size, shares_of(config, plan))
    if plan.key.tied:
        book.add("ends", "all_reduce", share * size)
    for axis in ("tp", "pp"):
        if axis in plan.key.summed:
            book.add(axis, "all_reduce", share * size)
    if "kv_replica" in plan.key.summed:
        # Of each matrix and bias with one group, the rows of a key and a value head are packed.
        spans = plan.shards(coordinate, config.shares)
        elements = 0
        for slot in plan.slots:
            rows = divide(2 * (slot.stop - slot.start), heads + 2)
            parts = (intersect((slot.stop - rows, slot.stop), span) for span in spans)
            elements += sum(stop - start for start, stop in filter(None, parts))
        book.add("kv_replica", "all_reduce", elements * size, calls=int(elements > 0))


def _buffers(
    config: RunConfig, padded_rows: int, pp_rank: int
) -> Iterator[tuple[BufferPlan, list[int]]]:
    """Yield each buffer of a rank, and how many units of each chunk that uses it do.

    Learned biases by distance are in all chunks, also in those without layers of their stack.
    """
    stages = [config.stages[at] for at in config.placement.positions(pp_rank)]
    for number, plans in enumerate(chunk_buffers(config, padded_rows, pp_rank)):
        for plan in plans:
            assert isinstance(plan.key, BufferKey)
            # Nobody else uses it, but what chunks have in common: that lies apart.
            users = stages if plan.key.alone and not plan.key.tied else stages[number : number + 1]
            uses = [_uses(config, stage, plan) for stage in users]
            yield plan, [times for times in uses if times or plan.key.unit.endswith(BIASES)]


def _uses(config: RunConfig, stage: Stage, plan: BufferPlan) -> int:
    """Return how often units of a stage compute with a buffer, in one forward."""
    assert isinstance(plan.key, BufferKey)
    depths = stage.num_mtp_layers
    heads = 1 + depths if stage.is_last else 0
    if plan.key.unit == "embedding":
        tied = not config.model.untie_embeddings_and_output_weights
        vectors = any(slot.name.startswith("embedding.word") for slot in plan.slots)
        texts = len(stacks.lengths(config)) * stage.is_first
        return texts + depths + (heads if tied and vectors else 0)
    if plan.key.unit.endswith(BIASES):
        mine = plan.key.unit == f"decoder{BIASES}"
        return int(any(stacks.is_decoders(config.model, n) == mine for n in stage.layers))
    return heads if plan.key.unit == "output_layer" else 1


def _recomputed_early(config: RunConfig, pp_rank: int) -> Iterator[int]:
    """Yield the layers that a recomputed unit runs through before its last one."""
    for position in config.placement.positions(pp_rank):
        for unit in stacks.units_made_again(config.model, config.stages[position].layers):
            yield from unit[:-1]
