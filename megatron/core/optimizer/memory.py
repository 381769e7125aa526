"""Bytes of weights, gradients and optimizer state, from layouts alone; nothing here imports torch.

`Optimizer.memory` measures the same categories in a run; the two agree to the byte.
"""

from collections.abc import Sequence

from megatron.core.distributed.layout import BufferPlan
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.precision.config import PrecisionConfig

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


def states_per_parameter(config: OptimizerConfig) -> int:
    """Return how many numbers the update rule keeps for each parameter."""
    if config.optimizer == "adam":
        return 2
    return 1 if config.sgd_momentum else 0


def predict(
    plans: Sequence[BufferPlan], config: OptimizerConfig, precision: PrecisionConfig
) -> dict[str, int]:
    """Return the bytes of a rank that holds the buffers of ``plans``, by category."""
    size = sum(plan.size for plan in plans)
    main = BYTES[precision.accumulation_dtype]
    has_masters = precision.params_dtype != precision.accumulation_dtype
    return {
        "weights": size * BYTES[precision.params_dtype],
        "gradients": size * main,
        "masters": size * main if has_masters else 0,
        "states": size * main * states_per_parameter(config),
    }
