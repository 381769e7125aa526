"""Bytes of weights, gradients and optimizer state, from layouts alone; nothing here imports torch.

`Optimizer.memory` measures the same categories in a run; the two agree to the byte.
"""

from collections.abc import Sequence

from megatron.core.distributed.config import Strategy
from megatron.core.distributed.layout import BufferPlan, first_elements
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
    *,
    by_torch: bool = False,
) -> dict[str, int]:
    """Return the bytes of a rank that holds the buffers of ``plans``, by category.

    All are on the device, but ``host``: what --optimizer-cpu-offload keeps.

    Args:
        plans: its buffers.
        config: the update rule.
        precision: dtypes.
        strategy: what replicas share out.
        shares: into how many shares.
        by_torch: torch's ``fully_shard`` does it, which keeps weights and gradients alike, and as
            fine as masters.
    """
    weight, gradient = precision.params_dtype, precision.grad_dtype
    if by_torch:
        weight = gradient = precision.main_dtype
    size = sum(plan.size for plan in plans)
    share = divide(size, shares)
    has_masters = weight != precision.main_dtype
    weights = share if strategy == "optim_grads_params" else size
    gradients = share if strategy in ("optim_grads", "optim_grads_params") else size
    master = BYTES[precision.main_dtype]
    # Weights are rounded on the host, where they are coarser than masters.
    on_host = master + BYTES[gradient] + (BYTES[weight] if has_masters else 0)
    masters = states = host = 0
    for plan in plans:
        mine = divide(plan.size, shares)
        away = first_elements(mine, config.offloaded_fraction)
        kept = state_bytes(plan.rule, config, precision)
        masters += (mine - away) * master if has_masters else 0
        states += (mine - away) * kept
        host += away * (on_host + kept)
    return {
        "weights": weights * BYTES[weight],
        "gradients": gradients * BYTES[gradient],
        "masters": masters,
        "states": states,
        "host": host,
    }
