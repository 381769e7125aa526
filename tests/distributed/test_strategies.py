"""Every sharding strategy in every precision with every kind of recomputation.

In float64 each equals the serial run to 1e-10. In other precisions recomputation changes no bit,
and sums over replicas are rounded in another order; what may come of that is bounded: three
iterations' losses and norms beside those of replicas that share nothing out, and these beside fp32.
"""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from megatron.core.distributed.config import STRATEGIES
from megatron.core.precision import moments
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
HYBRID = "--num-distributed-optimizer-instances 2"
"""Behind the words of a layout of four replicas: they share out in two groups."""
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
    "fp16 moments": (
        {
            "bf16": True,
            "use_precision_aware_optimizer": True,
            "exp_avg_dtype": "fp16",
            "exp_avg_sq_dtype": "fp16",
        },
        1e-4,
    ),
    "bf16 sums": ({"bf16": True, "accumulate_allreduce_grads_in_fp32": False}, 5e-3),
    "bf16 on the way": (
        {"bf16": True, "grad_reduce_in_bf16": True, "accumulate_allreduce_grads_in_fp32": True},
        5e-3,
    ),
    "fp16 sums": (
        {
            "fp16": True,
            "initial_loss_scale": 1024.0,
            "accumulate_allreduce_grads_in_fp32": False,
        },
        1e-3,
    ),
}
"""Settings, and the largest relative difference of a loss or norm."""


@pytest.fixture(scope="module")
def runs(pool: Pool) -> OutcomeCache:
    return OutcomeCache(pool)


def configs(strategy: str, recomputed: str, layout: str = LAYOUT) -> tuple[RunConfig, RunConfig]:
    """Return the run on replicas, and the serial one, which keeps all."""
    words, *behind = layout.split(" --", 1)
    words += "" if strategy == "no_shard" else f" {strategy}"
    where = parse_layout(" --".join([words, *behind]), "test")
    # At this beta moments may be short.
    settings = f"{MODEL} --adam-beta2 0.99"
    on = SmallRun(read_settings(f"{settings} {RECOMPUTED[recomputed]}".split(), "test").values)
    plain = SmallRun(read_settings(settings.split(), "test").values)
    return on.on(where), plain.reference(where)


@pytest.mark.parametrize("recomputed", RECOMPUTED)
@pytest.mark.parametrize("strategy", [*STRATEGIES, TORCH])
def test_float64_equals_the_serial_run(runs: OutcomeCache, strategy: str, recomputed: str) -> None:
    config, reference = configs(strategy, recomputed)
    apart = compare(runs.of(config), runs.of(reference))
    assert apart.largest <= 1e-10, apart


def in_precision(strategy: str, recomputed: str, precision: str, layout: str = LAYOUT) -> RunConfig:
    config, _ = configs(strategy, recomputed, layout)
    values = PrecisionConfig.resolve(**PRECISIONS[precision][0])
    moments.check(values.exp_avg_sq_dtype, config.optimizer.adam_beta2, ("", ""))
    return replace(config, precision=values)


def numbers(outcome: Outcome) -> list[float]:
    return [*outcome.losses, *outcome.norms]


def far(found: Outcome, expected: Outcome) -> float:
    """Return the largest relative difference of a loss or norm."""
    pairs = zip(numbers(found), numbers(expected), strict=True)
    return max(abs(one - other) / abs(other) for one, other in pairs)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_other_precisions_stay_within_a_bound(
    runs: OutcomeCache, precision: str, strategy: str
) -> None:
    found = runs.of(in_precision(strategy, "kept", precision))
    expected = runs.of(in_precision("no_shard", "kept", precision))
    assert far(found, expected) <= PRECISIONS[precision][1]


HALVES = {
    name: 2e-3 if fields.get("fp16") else 1e-2
    for name, (fields, _) in PRECISIONS.items()
    if name != "fp32"
}
"""Largest relative difference of a loss or norm from fp32's: a few last bits of a weight."""


def near_fp32(runs: OutcomeCache, strategy: str, precision: str, layout: str = LAYOUT) -> None:
    """Compare a run in half with replicas that sum in fp32 and share nothing out."""
    found = runs.of(in_precision(strategy, "kept", precision, layout))
    exact = runs.of(in_precision("no_shard", "kept", "fp32", layout.split(" --")[0]))
    assert 0 < far(found, exact) <= HALVES[precision]


@pytest.mark.parametrize("strategy", [*STRATEGIES, TORCH])
@pytest.mark.parametrize("precision", ["bf16 sums", "bf16 on the way", "fp16 sums"])
def test_what_replicas_sum_in_half_is_near_fp32(
    runs: OutcomeCache, precision: str, strategy: str
) -> None:
    near_fp32(runs, strategy, precision)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [*STRATEGIES, TORCH])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16 moments", "fp16 moments"])
def test_half_precision_is_near_fp32(runs: OutcomeCache, precision: str, strategy: str) -> None:
    near_fp32(runs, strategy, precision)


GROUPS = [*STRATEGIES[1:], TORCH]
"""Groups of replicas need something to share out."""
FEW = [s if s in ("optim", TORCH) else pytest.param(s, marks=pytest.mark.slow) for s in GROUPS]
SHORT = [pytest.param(name, marks=pytest.mark.slow) for name in HALVES if name != "bf16 on the way"]


@pytest.mark.parametrize("strategy", FEW)
@pytest.mark.parametrize("precision", ["bf16 on the way", *SHORT])
def test_groups_of_replicas_are_near_fp32(
    runs: OutcomeCache, precision: str, strategy: str
) -> None:
    near_fp32(runs, strategy, precision, f"dp4 overlap {HYBRID}")


_QUICK = ("fp32", "bf16", "fp16", "bf16 moments")
"""With these formats every kind of recomputation is tried each time."""
EVERYWHERE = [
    *itertools.product(STRATEGIES, _QUICK),
    *((TORCH, precision) for precision in ("fp32", "bf16")),
]
SELDOM = [
    *((s, p) for s, p in itertools.product(STRATEGIES, PRECISIONS) if p not in _QUICK),
    *((TORCH, precision) for precision in PRECISIONS if precision not in ("fp32", "bf16")),
]


@pytest.mark.parametrize("recomputed", [name for name in RECOMPUTED if name != "kept"])
@pytest.mark.parametrize(
    ("strategy", "precision"),
    [*EVERYWHERE, *(pytest.param(*each, marks=pytest.mark.slow) for each in SELDOM)],
)
def test_recomputation_changes_no_bit(
    runs: OutcomeCache, precision: str, strategy: str, recomputed: str
) -> None:
    again = runs.of(in_precision(strategy, recomputed, precision))
    assert numbers(again) == numbers(runs.of(in_precision(strategy, "kept", precision)))


@pytest.mark.slow
@pytest.mark.parametrize("recomputed", [name for name in RECOMPUTED if name != "kept"])
@pytest.mark.parametrize("strategy", GROUPS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16 moments"])
def test_recomputation_changes_no_bit_in_groups_of_replicas(
    runs: OutcomeCache, precision: str, strategy: str, recomputed: str
) -> None:
    layout = f"dp4 overlap {HYBRID}"
    again = runs.of(in_precision(strategy, recomputed, precision, layout))
    assert numbers(again) == numbers(runs.of(in_precision(strategy, "kept", precision, layout)))
