"""Runs whose routers drop, jitter and assign equal the serial one, and so do logged losses."""

from typing import Any

import pytest

from megatron.training.verification import outcomes
from megatron.training.verification.outcomes import Outcome
from tests.distributed.test_moe_layouts import A2A, CP, EP, ETP, ITERATIONS, PP, TP, outcome
from tests.harness import Pool

LOSSES = "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1 0.2"
VARIANTS = {
    "dropped": (
        f"{LOSSES} --moe-z-loss-coeff 0.05 --moe-router-topk 3 --moe-router-enable-expert-bias "
        "--moe-router-score-function sqrtsoftplus --moe-router-bias-update-rate 0.05 "
        "--moe-expert-capacity-factor 0.75 --moe-input-jitter-eps 0.2 --recompute-granularity "
        "selective --recompute-modules moe"
    ),
    "dropped by position": (
        "--moe-router-pre-softmax --moe-expert-capacity-factor 0.5 --moe-token-drop-policy position"
    ),
    "sinkhorn": "--moe-router-load-balancing-type sinkhorn --moe-router-topk 2",
}
LAYOUTS = [
    (2, f"{TP} 2 {ETP} 1 {EP} 2"),
    (4, f"{CP} 2 {PP} 2"),
    (4, f"{TP} 2 --sequence-parallel {CP} 2 {EP} 2 {A2A}"),
    (4, f"{EP} 2 {A2A} --use-megatron-fsdp"),
]
USUAL = (1, 2)
"""Numbers of the layouts that every run of the tests tries."""


@pytest.fixture(scope="module", params=VARIANTS)
def serial(request: pytest.FixtureRequest, pool: Pool) -> tuple[str, Outcome]:
    return request.param, outcome(pool, 1, VARIANTS[request.param])[0]


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        pytest.param(*layout, marks=() if number in USUAL else pytest.mark.slow)
        for number, layout in enumerate(LAYOUTS)
    ],
)
def test_equals_the_serial_run(
    pool: Pool, serial: tuple[str, Outcome], world: int, layout: str
) -> None:
    variant, expected = serial
    found, moved = outcome(pool, world, f"{VARIANTS[variant]} {layout}")
    apart = outcomes.compare(found, expected)
    assert apart.are_equal, apart
    if variant != "sinkhorn":  # whose rounds are not foreseen
        assert list(map(foreseen, found.traffic)) == list(map(foreseen, moved))


def foreseen(traffic: dict[Any, Any]) -> dict[Any, Any]:
    """Return what is known beforehand: dropped choices send nothing to their experts."""
    return {key: cost for key, cost in traffic.items() if key[1] != "all_to_all"}


@pytest.mark.parametrize("layout", ["", f"{TP} 2 {EP} 2 {ETP} 1 {A2A}"])
def test_experts_that_are_filled_up_give_the_same(pool: Pool, layout: str) -> None:
    words, world = VARIANTS["dropped"], 2 if layout else 1
    expected = outcome(pool, world, f"{words} {layout}")[0]
    found, _ = outcome(pool, world, f"{words} {layout} --moe-pad-expert-input-to-capacity")
    apart = outcomes.compare(found, expected)
    assert apart.are_equal, apart


def test_equal_weights_are_dropped_by_position_whatever_rounding_makes_of_them(pool: Pool) -> None:
    """Tokens with the same history have equal weights, but for their last bits."""
    words = (
        "--position-embedding-type rope --num-experts 6 --swiglu --moe-router-topk 3 "
        "--moe-router-score-function sigmoid --moe-aux-loss-coeff 0.3 "
        "--moe-expert-capacity-factor 0.9"
    )
    expected = outcome(pool, 1, words)[0]
    found = outcome(pool, 2, f"{words} {CP} 2")[0]
    apart = outcomes.compare(found, expected)
    assert apart.are_equal, apart


@pytest.mark.parametrize("stages", [2, 4])
def test_par_20_logged_losses_do_not_grow_with_the_stages(pool: Pool, stages: int) -> None:
    # Each stage's sum over its layers was logged as if it were a mean over all.
    words = f"{LOSSES} --moe-z-loss-coeff 0.05"
    expected = outcome(pool, 1, words)[0].losses
    found = outcome(pool, stages, f"{words} {PP} {stages}")[0].losses
    assert len(expected) == 4 * ITERATIONS  # of tokens, of both kinds of balance, of logits
    assert found == pytest.approx(expected, rel=1e-10)
