"""Bytes of weights, gradients and optimizer state, from layouts alone; nothing here imports torch.

`Optimizer.memory` measures the same categories in a run; the two agree to the byte.
"""

from collections.abc import Sequence

from megatron.core.distributed.config import Strategy, shares_gradients, shares_weights
from megatron.core.distributed.layout import BufferPlan
from megatron.core.distributed.ranges import ALIGNMENT, Part, first_part
from megatron.core.optimizer import rules
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.precision.config import PrecisionConfig
from megatron.core.utils import divide, round_up

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


BLOCK = ALIGNMENT
"""Numbers of a state in fp16 that share a scale of one byte (`scaled`); parameters start at
multiples of it, so that each has blocks of its own."""


def blocks(size: int) -> int:
    """Return the number of blocks of ``size`` numbers."""
    return round_up(size, BLOCK) // BLOCK


def state_dtypes(rule: str, config: OptimizerConfig, precision: PrecisionConfig) -> list[str]:
    """Return the dtypes of what an update rule keeps for each parameter."""
    dtypes, others = precision.state_dtypes, precision.accumulation_dtype
    return [dtypes.get(name, others) for name in rules.states(rule, config)]


def stored_bytes(rule: str, config: OptimizerConfig, precision: PrecisionConfig) -> int:
    """Return the bytes that a checkpoint has of them, where fp16 with scales becomes fp32."""
    dtypes = state_dtypes(rule, config, precision)
    return sum(BYTES["float32" if dtype == "float16" else dtype] for dtype in dtypes)


def _state_bytes(dtypes: Sequence[str], sizes: Sequence[int]) -> int:
    """Return the bytes of states over ranges of ``sizes``."""
    scales = dtypes.count("float16") * sum(map(blocks, sizes))
    return sum(BYTES[dtype] for dtype in dtypes) * sum(sizes) + scales


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
    weights = share if shares_weights(strategy) else size
    gradients = share if shares_gradients(strategy) else size
    master = BYTES[precision.main_dtype]
    # Weights are rounded on the host, where they are coarser than masters.
    on_host = master + BYTES[gradient] + (BYTES[weight] if has_masters else 0)
    masters = states = host = 0
    for plan in plans:
        kept = state_dtypes(plan.rule, config, precision)
        spans = plan.shards(0, shares)
        away, here = map(_sizes, first_part(spans, config.offloaded_fraction))
        masters += sum(here) * master if has_masters else 0
        states += _state_bytes(kept, here)
        host += sum(away) * on_host + _state_bytes(kept, away)
    return {
        "weights": weights * BYTES[weight],
        "gradients": gradients * BYTES[gradient],
        "masters": masters,
        "states": states,
        "host": host,
    }


def _sizes(parts: Sequence[Part]) -> list[int]:
    return [part.stop - part.start for _, part in parts]
