"""Bytes of weights, gradients and optimizer state, from layouts alone; nothing here imports torch.

`Optimizer.memory` measures the same categories in a run; the two agree to the byte.
"""

from collections.abc import Sequence

from megatron.core.distributed.config import Strategy
from megatron.core.distributed.layout import BufferPlan
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.precision.config import PrecisionConfig
from megatron.core.utils import divide

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


def state_bytes(config: OptimizerConfig, precision: PrecisionConfig) -> int:
    """Return the bytes of what the update rule keeps for each parameter."""
    if config.optimizer == "adam":
        return sum(BYTES[dtype] for dtype in precision.state_dtypes.values())
    return BYTES[precision.accumulation_dtype] if config.sgd_momentum else 0


def predict(
    plans: Sequence[BufferPlan],
    config: OptimizerConfig,
    precision: PrecisionConfig,
    strategy: Strategy = "no_shard",
    shares: int = 1,
) -> dict[str, int]:
    """Return the bytes of a rank that holds the buffers of ``plans``, by category.

    Args:
        plans: its buffers.
        config: the update rule.
        precision: dtypes.
        strategy: what replicas share out.
        shares: into how many shares.
    """
    size = sum(plan.size for plan in plans)
    share = divide(size, shares)
    has_masters = precision.params_dtype != precision.main_dtype
    weights = share if strategy == "optim_grads_params" else size
    gradients = share if strategy in ("optim_grads", "optim_grads_params") else size
    return {
        "weights": weights * BYTES[precision.params_dtype],
        "gradients": gradients * BYTES[precision.grad_dtype],
        "masters": share * BYTES[precision.main_dtype] if has_masters else 0,
        "states": share * state_bytes(config, precision),
    }
