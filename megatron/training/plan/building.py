"""The memory of a model that is being built, before it trains; from configs alone.

The model is built whole, at once; then its weights move into one buffer after the other, each with
its gradients, of which a rank keeps its share. So the first moments may be fuller than training is:
where much is shared out, or where an update rule keeps nothing. With --init-model-with-meta-device
weights have no memory before their buffer has.
"""

from collections.abc import Sequence

from megatron.core.distributed.layout import BufferPlan
from megatron.core.optimizer.memory import BYTES
from megatron.core.utils import divide
from megatron.training.config import RunConfig
from megatron.training.plan.buffer_plans import shares_of


def building(config: RunConfig, plans: Sequence[BufferPlan]) -> int:
    """Return the bytes of weights and gradients on a rank with these buffers, at their most."""
    weight, gradient = (
        BYTES[dtype] for dtype in (config.precision.params_dtype, config.precision.grad_dtype)
    )
    late = config.replicas.init_model_with_meta_device
    sizes = [0 if late else weight * sum(s.stop - s.start for s in p.slots) for p in plans]
    waiting, made, most = sum(sizes), 0, sum(sizes)
    for plan, moved in zip(plans, sizes, strict=True):
        shares = shares_of(config, plan)
        whole, share = plan.size * (weight + gradient), divide(plan.size, shares)
        pieces = 0
        if shares > 1:
            pieces += share * gradient if config.replicas.shards_gradients else 0
            pieces += share * weight if config.replicas.shards_weights else 0
        most = max(most, waiting + made + whole, waiting - moved + made + whole + pieces)
        waiting -= moved
        made += pieces
        if shares == 1 or not config.replicas.shards_weights:
            made += plan.size * weight
        if shares == 1 or not config.replicas.shards_gradients:
            made += plan.size * gradient
    return most
