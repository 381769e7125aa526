"""Every sharding strategy in every precision with every kind of recomputation.

In float64 each equals the serial run to 1e-10. In other precisions recomputation changes no bit,
and sums over replicas are rounded in another order; what may come of that is bounded: three
iterations' losses and norms beside those of replicas that share nothing out.
"""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from megatron.core.distributed.config import STRATEGIES
from megatron.core.precision.config import PrecisionConfig
from megatron.training.arguments import read_settings
from megatron.training.config import RunConfig
from megatron.training.verification.layout_words import parse_layout
from megatron.training.verification.outcomes import Outcome, compare
from megatron.training.verification.small_run import SmallRun
from tests.harness import Pool
from tests.outcome_cache import OutcomeCache

MODEL = (
    "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu"
)
RECOMPUTED = {
    "kept": "",
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
    "block": "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
    "selective": "--recompute-granularity selective --recompute-modules core_attn mlp layernorm",
}
LAYOUT = "dp2 overlap"
TORCH = "torch_fsdp2"
"""Word for torch's fully_shard, whose sums in half precision are bounded in `test_torch_fsdp`."""
PRECISIONS: dict[str, tuple[dict[str, Any], float]] = {
    "fp32": ({}, 1e-6),
    "bf16": ({"bf16": True}, 1e-6),
    "fp16": ({"fp16": True, "initial_loss_scale": 1024.0}, 1e-6),
    "bf16 moments": (
        {
            "bf16": True,
            "use_precision_aware_optimizer": True,
            "main_grads_dtype": "bf16",
            "exp_avg_dtype": "bf16",
            "exp_avg_sq_dtype": "bf16",
        },
        5e-3,
    ),
}
"""Settings, and the largest relative difference of a loss or norm."""


@pytest.fixture(scope="module")
def runs(pool: Pool) -> OutcomeCache:
    return OutcomeCache(pool)


def configs(strategy: str, recomputed: str) -> tuple[RunConfig, RunConfig]:
    """Return the run on two replicas, and the serial one, which keeps all."""
    words = "" if strategy == "no_shard" else f" {strategy}"
    layout = parse_layout(f"{LAYOUT}{words}", "test")
    on = SmallRun(read_settings(f"{MODEL} {RECOMPUTED[recomputed]}".split(), "test").values)
    plain = SmallRun(read_settings(MODEL.split(), "test").values)
    return on.on(layout), plain.reference(layout)


@pytest.mark.parametrize("recomputed", RECOMPUTED)
@pytest.mark.parametrize("strategy", [*STRATEGIES, TORCH])
def test_float64_equals_the_serial_run(runs: OutcomeCache, strategy: str, recomputed: str) -> None:
    config, reference = configs(strategy, recomputed)
    apart = compare(runs.of(config), runs.of(reference))
    assert apart.largest <= 1e-10, apart


def in_precision(strategy: str, recomputed: str, precision: str) -> RunConfig:
    fields, _ = PRECISIONS[precision]
    return replace(configs(strategy, recomputed)[0], precision=PrecisionConfig.resolve(**fields))


def numbers(outcome: Outcome) -> list[float]:
    return [*outcome.losses, *outcome.norms]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_other_precisions_stay_within_a_bound(
    runs: OutcomeCache, precision: str, strategy: str
) -> None:
    found = numbers(runs.of(in_precision(strategy, "kept", precision)))
    expected = numbers(runs.of(in_precision("no_shard", "kept", precision)))
    apart = [abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True)]
    assert max(apart) <= PRECISIONS[precision][1]


@pytest.mark.parametrize("recomputed", [name for name in RECOMPUTED if name != "kept"])
@pytest.mark.parametrize(
    ("strategy", "precision"),
    [*itertools.product(STRATEGIES, PRECISIONS), (TORCH, "fp32"), (TORCH, "bf16")],
)
def test_recomputation_changes_no_bit(
    runs: OutcomeCache, precision: str, strategy: str, recomputed: str
) -> None:
    again = runs.of(in_precision(strategy, recomputed, precision))
    assert numbers(again) == numbers(runs.of(in_precision(strategy, "kept", precision)))
