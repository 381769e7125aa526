"""Host memory that --async-save takes for copies of what a rank writes, at most.

Each byte is written once, replicas share them evenly, so a rank copies its share. At most, since a
rank of tensor parallelism may own less than it holds, as may the last stage of a tied embedding.
"""

from collections.abc import Sequence

from megatron.core.distributed.layout import BufferPlan
from megatron.core.optimizer.memory import BYTES, stored_bytes
from megatron.training.config import RunConfig
from megatron.training.plan.buffer_plans import replicas_of, shares_of

RANDOM = 64 * 2**10
"""Of the random generators; they are text of some twenty thousand bytes."""
ALIGNMENT = 64
"""Every box of a tensor begins at a multiple of it."""
BOXES = 4
"""Of a tensor and kind on one rank: a range of it, in the regions of gated and fused matrices."""


def staged(config: RunConfig, plans: Sequence[BufferPlan]) -> int:
    """Return the bytes that a rank with the buffers of ``plans`` copies for a save."""
    checkpoint, precision = config.checkpoint, config.precision
    if not (checkpoint.save and checkpoint.speed.async_save):
        return 0
    main = BYTES[precision.main_dtype]
    weight = main if config.shared_by_torch else BYTES[precision.params_dtype]
    master = main if weight != main else 0
    alone = not checkpoint.speed.ckpt_fully_parallel_save
    # Without sharing, the first replica writes what all hold; shares are everybody's own.
    whole = config.replicas.data_parallel_sharding_strategy == "optim_grads_params"
    size = 0
    for plan in plans:
        shares, sharers = shares_of(config, plan), replicas_of(config, plan)
        weights = shares if alone and whole else 1 if alone else sharers
        states = shares if alone else sharers
        kept = master + stored_bytes(plan.rule, config.optimizer, precision)
        boxes = BOXES * (len(plan.slots) + len(plan.buckets)) * ALIGNMENT
        size += -(-plan.size * weight // weights) + boxes
        if checkpoint.save_optim:
            size += -(-plan.size * kept // states) + boxes * (bool(master) + 2)
    limit = checkpoint.speed.host_limit
    return size + RANDOM if limit is None else min(size + RANDOM, limit)
