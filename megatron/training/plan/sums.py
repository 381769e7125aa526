"""Bytes that are on a rank for communication after the last backward; from configs alone.

Where gradients travel in another dtype than they are kept in, all buckets of a chunk are copied at
once; those of whole units, which are summed in every backward, are in `passing`, but experts alone
in their instance share nothing and are summed here. Then gradients of
regions are summed in place, but for those that lie in several pieces, which are packed for a moment
(`core/distributed/finalize`). Muon gathers matrices that tensor-parallel ranks hold parts of, where
each makes all of the update.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from megatron.core.distributed.layout import BufferPlan
from megatron.core.distributed.ranges import Range, intersect
from megatron.core.optimizer.memory import BYTES
from megatron.core.utils import divide
from megatron.training.config import RunConfig
from megatron.training.plan.buffer_plans import BufferKey, chunk_parameters, replicas_of, shares_of


def copies(config: RunConfig, chunks: Sequence[Sequence[BufferPlan]]) -> list[int]:
    """Return the bytes of each chunk's gradients as they travel, where these are copies."""
    precision = config.precision
    if precision.reduce_dtype == precision.grad_dtype:
        return [0] * len(chunks)
    size = BYTES[precision.reduce_dtype]
    return [size * sum(_sent(config, plan) for plan in chunk) for chunk in chunks]


def _sent(config: RunConfig, plan: BufferPlan) -> int:
    """Return the elements of a buffer that are sent, and of what comes out apart."""
    shares = shares_of(config, plan)
    by_unit = config.replicas.shards_gradients and shares > 1
    if replicas_of(config, plan) == 1 or by_unit:
        return 0
    # Of what is shared out, this rank's share comes out apart.
    return plan.size + (divide(plan.size, shares) if shares > 1 else 0)


def largest_moment(
    config: RunConfig, padded_rows: int, pp_rank: int, plans: Sequence[BufferPlan]
) -> int:
    """Return the bytes of what is packed or gathered when all gradients are there.

    Args:
        config: the run.
        padded_rows: rows of the vocabulary, padding included.
        pp_rank: a rank of the pipeline.
        plans: of its buffers.
    """
    sizes = config.axis_sizes
    packed = max((_packed(config, plan, sizes) for plan in plans), default=0)
    return max(packed, *_gathered(config, padded_rows, pp_rank, plans), 0)


def _packed(config: RunConfig, plan: BufferPlan, sizes: Mapping[str, int]) -> int:
    """Return the bytes that regions of a buffer are packed into, at most."""
    assert isinstance(plan.key, BufferKey)
    shares = shares_of(config, plan)
    share = divide(plan.size, shares)
    elements, pieces = 0, len(plan.buckets) if shares > 1 else 1
    is_tied = plan.key.tied and sizes["ends"] > 1
    if pieces > 1 and (is_tied or ("tp" in plan.key.summed and sizes["tp"] > 1)):
        elements = share
    if "kv_replica" in plan.key.summed and sizes["kv_replica"] > 1:
        elements = max(elements, _key_value_rows(config, plan))
    return elements * BYTES[config.precision.grad_dtype]


def _key_value_rows(config: RunConfig, plan: BufferPlan) -> int:
    """Return the elements of what is packed of keys and values, on the rank that has most.

    Of each matrix and bias with one group these are the rows of a key and a value head.
    """
    attention, shares = config.model.attention, config.shares
    heads = attention.num_attention_heads // config.parallel.tensor_model_parallel_size
    held: Counter[int] = Counter()
    pieces: Counter[int] = Counter()
    for slot in plan.slots:
        rows = (slot.stop - divide(2 * (slot.stop - slot.start), heads + 2), slot.stop)
        for share, elements in _by_share(rows, plan, shares):
            held[share] += elements
            pieces[share] += 1
    # One piece is summed where it lies.
    return max((held[share] for share, count in pieces.items() if count > 1), default=0)


def _by_share(part: Range, plan: BufferPlan, shares: int) -> Iterator[tuple[int, int]]:
    """Yield (share, elements) of each piece of a range that lies in a share of some bucket."""
    if shares == 1:
        yield 0, part[1] - part[0]
        return
    for start, stop in plan.buckets:
        inside, size = intersect(part, (start, stop)), divide(stop - start, shares)
        if inside is not None:
            first, last = ((place - start) // size for place in (inside[0], inside[1] - 1))
            for share in range(first, last + 1):
                piece = intersect(inside, (start + share * size, start + (share + 1) * size))
                assert piece is not None
                yield share, piece[1] - piece[0]


def _gathered(
    config: RunConfig, padded_rows: int, pp_rank: int, plans: Sequence[BufferPlan]
) -> Iterator[int]:
    """Yield the bytes of each matrix that Muon gathers, on whichever rank."""
    optimizer = config.optimizer
    if optimizer.optimizer != "muon" or optimizer.muon_tp_mode != "duplicated":
        return
    chunks = chunk_parameters(config, padded_rows, pp_rank, ways=1)
    whole = {parameter.name: parameter for chunk in chunks for parameter in chunk}
    parallel = config.parallel
    for slot in (slot for plan in plans if plan.rule == "muon" for slot in plan.slots):
        one, here = whole[slot.name], slot.stop - slot.start
        if one.numel != here:
            ways, matrices = parallel.tensor_model_parallel_size, 1
            if one.expert:
                ways, matrices = parallel.expert_tensor_parallel_size, one.shape[0]
            yield ways * here // matrices * BYTES[config.precision.accumulation_dtype]
