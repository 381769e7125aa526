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


def state_bytes(rule: str, config: OptimizerConfig, precision: PrecisionConfig) -> int:
    """Return the bytes of what an update rule keeps for each parameter."""
    if rule == "adam":
        return sum(BYTES[dtype] for dtype in precision.state_dtypes.values())
    if rule == "lion":
        return BYTES[precision.state_dtypes["exp_avg"]]
    assert rule in ("muon", "sgd"), rule
    has_momentum = rule == "muon" or config.sgd_momentum
    return BYTES[precision.accumulation_dtype] if has_momentum else 0


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
        "states": sum(
            divide(plan.size, shares) * state_bytes(plan.rule, config, precision) for plan in plans
        ),
    }
