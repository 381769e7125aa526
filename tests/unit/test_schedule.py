"""Schedules against points worked out by hand and closed formulas written here."""

import math
from fractions import Fraction

import pytest

from megatron.core.optimizer.config import OptimizerConfig, ScheduleConfig
from megatron.core.optimizer.groups import Rates
from megatron.core.optimizer.schedule import (
    Progress,
    Schedule,
    build_schedule,
    choose,
    describe_change,
    differences,
)
from megatron.core.utils import UserError
from megatron.training.batch_size import BatchSizes


def schedule(weight_decay: float = 0.1, train_iters: int = 100, **fields: object) -> Schedule:
    config = ScheduleConfig(**{"lr": 1.0, **fields})
    return build_schedule(config, weight_decay, train_iters=train_iters)


def rates(built: Schedule, *positions: int) -> list[float]:
    return [built.learning_rate_at(position) for position in positions]


def test_linear_by_hand() -> None:
    built = schedule(min_lr=0.2, lr_warmup_iters=10, lr_decay_iters=90)
    assert rates(built, 0, 5, 10, 50, 90, 91, 200) == pytest.approx(
        [0.0, 0.5, 1.0, 0.6, 0.2, 0.2, 0.2], rel=1e-15
    )


def test_warmup_starts_at_its_own_rate() -> None:
    built = schedule(lr_warmup_iters=4, lr_warmup_init=0.2)
    assert rates(built, 0, 1, 2, 4) == pytest.approx([0.2, 0.4, 0.6, 1.0], rel=1e-15)


def test_cosine_by_hand() -> None:
    built = schedule(lr_decay_style="cosine", min_lr=0.1, lr_warmup_iters=10, lr_decay_iters=70)
    # A third of the way the cosine is 1/2, so 3/4 of the span is left; at two thirds 1/4.
    assert rates(built, 10, 30, 40, 50, 70) == pytest.approx(
        [1.0, 0.1 + 0.9 * 0.75, 0.55, 0.1 + 0.9 * 0.25, 0.1], rel=1e-14
    )


def test_constant_keeps_the_peak_beyond_the_decay() -> None:
    built = schedule(lr_decay_style="constant", lr_warmup_iters=2, lr_decay_iters=50)
    assert rates(built, 0, 1, 2, 50, 51, 10**6) == [0.0, 0.5, 1.0, 1.0, 1.0, 1.0]


def test_inverse_square_root_by_hand() -> None:
    built = schedule(
        lr_decay_style="inverse-square-root", min_lr=0.3, lr_warmup_iters=4, lr_decay_iters=90
    )
    assert rates(built, 4, 16, 36, 64, 90, 91) == pytest.approx(
        [1.0, 0.5, 1 / 3, 0.3, 0.3, 0.3], rel=1e-15
    )
    without = schedule(lr_decay_style="inverse-square-root")
    assert rates(without, 0, 1, 4) == [1.0, 1.0, 0.5]


@pytest.mark.parametrize(
    ("style", "quarter", "half", "end"),
    [
        ("linear", 0.75, 0.5, 0.0),
        ("cosine", (1 + math.sqrt(0.5)) / 2, 0.5, 0.0),
        ("exponential", 2 / 2**0.25 - 1, math.sqrt(2) - 1, 0.0),
        ("minus_sqrt", 0.5, 1 - math.sqrt(0.5), 0.0),
    ],
)
def test_wsd_falls_at_the_end_only(style: str, quarter: float, half: float, end: float) -> None:
    built = schedule(
        lr_decay_style="WSD",
        lr_wsd_decay_style=style,
        lr_wsd_decay_iters=40,
        lr_warmup_iters=10,
        min_lr=0.2,
    )
    expected = [1.0, 1.0] + [0.2 + 0.8 * left for left in (quarter, half, end)]
    assert rates(built, 10, 60, 70, 80, 100) == pytest.approx(expected, rel=1e-14)
    assert rates(built, 101) == [0.2]


def test_weight_decay_ramp_by_hand() -> None:
    ramp = {"start_weight_decay": 0.1, "end_weight_decay": 0.5}
    linear = schedule(weight_decay_incr_style="linear", **ramp)
    cosine = schedule(weight_decay_incr_style="cosine", **ramp)
    positions = (0, 25, 50, 100, 101)
    assert [linear.weight_decay_at(p) for p in positions] == pytest.approx(
        [0.1, 0.2, 0.3, 0.5, 0.5], rel=1e-15
    )
    quarter = 0.1 + 0.4 * (1 - math.cos(math.pi / 4)) / 2
    assert [cosine.weight_decay_at(p) for p in positions] == pytest.approx(
        [0.1, quarter, 0.3, 0.5, 0.5], rel=1e-14
    )
    assert schedule(weight_decay=0.07).weight_decay_at(30) == 0.07


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_samples_and_iterations_agree_at_a_constant_batch(style: str) -> None:
    """What Megatron-LM counts in samples is the same curve in iterations."""
    fields = {"lr": 3e-4, "min_lr": 3e-5, "lr_decay_style": style}
    by_iteration = build_schedule(
        ScheduleConfig(**fields, lr_warmup_iters=7, lr_decay_iters=90), 0.1, train_iters=100
    )
    by_sample = build_schedule(
        ScheduleConfig(**fields, lr_warmup_samples=7 * 24, lr_decay_samples=90 * 24),
        0.1,
        train_samples=2400,
    )
    for iteration in range(105):
        progress = Progress(iteration, iteration * 24)
        expected = by_iteration.learning_rate(progress)
        assert by_sample.learning_rate(progress) == pytest.approx(expected, rel=1e-14)


def test_the_decay_is_as_long_as_the_run_by_default() -> None:
    assert schedule(train_iters=64).decay == 64
    config = ScheduleConfig(lr=1.0)
    built = build_schedule(config, 0.0, train_samples=1000)
    assert (built.unit, built.decay) == ("samples", 1000)
    assert built.learning_rate(Progress(iterations=3, samples=250)) == 0.75


def test_lr_05_iterations_hold_in_iterations_under_ramp_up() -> None:
    """Batch 8 grows to 16; warm-up ends at iteration 10 and the fall at the run's last."""
    config = ScheduleConfig(
        lr=1.0,
        min_lr=0.1,
        lr_warmup_iters=10,
        lr_decay_iters=100,
        lr_decay_style="WSD",
        lr_wsd_decay_iters=20,
    )
    built = build_schedule(config, 0.0, train_iters=100)
    batches = BatchSizes((0, 160), (8, 16))
    samples, seen = 0, []
    for iteration in range(101):
        seen.append(built.learning_rate(Progress(iteration, samples)))
        samples += batches.at(samples)
    assert [iteration for iteration in range(100) if seen[iteration + 1] > seen[iteration]] == list(
        range(10)
    )
    assert seen[10:81] == [1.0] * 71
    assert seen[81] < 1.0
    assert seen[100] == pytest.approx(0.1, rel=1e-12)


def test_lr_07_warmup_fraction_is_a_share_of_the_decay() -> None:
    built = schedule(train_iters=350, lr_warmup_fraction=0.1)
    curve = rates(built, *range(351))
    assert sum(later > earlier for earlier, later in zip(curve, curve[1:], strict=False)) == 35
    # 0.29 x 100 is 28.999... in binary; rounding gives the 29 that was meant.
    assert schedule(lr_warmup_fraction=0.29, lr_decay_iters=100).warmup == 29
    assert float(Fraction(29, 100)) * 100 < 29


def test_curve_has_five_points_over_the_run() -> None:
    built = schedule(train_iters=200)
    assert [built.rates_at(point) for point in built.points()] == [
        Rates(1.0, 0.1),
        Rates(0.75, 0.1),
        Rates(0.5, 0.1),
        Rates(0.25, 0.1),
        Rates(0.0, 0.1),
    ]


def decoupled(
    peak: float | None, end: float | None = None, weight_decay: float = 0.1, **fields: object
) -> Schedule:
    config = ScheduleConfig(**{"lr": 1.0, "min_lr": 0.25, **fields})
    return build_schedule(
        config, weight_decay, train_iters=100, decoupled_lr=peak, decoupled_min_lr=end
    )


def test_embedding_and_head_may_have_a_curve_of_their_own() -> None:
    """The shape is the same, and so is where the warm-up starts; peak and end are theirs."""
    built = decoupled(4.0, 2.0, lr_warmup_iters=20, lr_warmup_init=0.5)
    points = [Progress(n, 0) for n in (0, 10, 20, 60, 100)]
    assert [built.rates(at).lr for at in points] == [0.5, 0.75, 1.0, 0.625, 0.25]
    assert [built.rates(at).decoupled_lr for at in points] == [0.5, 2.25, 4.0, 3.0, 2.0]
    assert {built.rates(at).weight_decay for at in points} == {0.1}
    assert decoupled(4.0).decoupled_min_lr == 0.25  # --min-lr
    assert decoupled(None, 2.0).rates_at(5).decoupled_lr is None
    assert Schedule.from_json(built.to_json()) == built
    old = built.to_json()
    del old["decoupled_lr"], old["decoupled_min_lr"]  # as an older checkpoint stores it
    assert Schedule.from_json(old).decoupled is None


@pytest.mark.parametrize(
    ("peak", "end", "fields", "named"),
    [
        (0.1, 0.2, {}, r"--decoupled-lr \(0.1\) must be at least where it ends \(0.2: --decoupled"),
        (0.1, None, {}, r"--decoupled-lr \(0.1\) .* \(0.25: --min-lr, since there is no"),
        (0.3, None, {"lr_warmup_init": 0.5}, r"--lr-warmup-init \(0.5\) must be at most --decoup"),
    ],
)
def test_decoupled_rates_that_do_not_fit_are_refused(
    peak: float, end: float | None, fields: dict[str, object], named: str
) -> None:
    with pytest.raises(UserError, match=named):
        decoupled(peak, end, **fields)


def test_another_decoupled_rate_is_another_schedule() -> None:
    old, new = decoupled(None), decoupled(4.0, 2.0)
    assert differences(old, new) == ["decoupled_lr: None -> 4.0", "decoupled_min_lr: None -> 2.0"]
    _, first, *_ = describe_change(old, new)
    assert first.endswith("0.1 -> 0.1 | embedding and head 1.000000e+00 -> 4.000000e+00")
    assert "embedding" not in "".join(describe_change(old, decoupled(None, lr=2.0)))


def test_a_schedule_survives_json() -> None:
    built = schedule(lr_decay_style="WSD", lr_wsd_decay_iters=5, lr_warmup_fraction=0.05)
    assert Schedule.from_json(built.to_json()) == built


def test_wsd_without_a_fall_stays_at_the_peak() -> None:
    built = schedule(lr_decay_style="WSD", lr_wsd_decay_iters=0)
    assert {built.learning_rate_at(p) for p in range(built.warmup, built.decay + 1)} == {built.lr}
    assert built.learning_rate_at(built.decay + 1) == built.min_lr


def test_lr_03_progress_is_given_not_counted() -> None:
    """Asking twice, as loading twice would, moves nothing."""
    built = schedule()
    first = built.learning_rate(Progress(40, 640))
    again = Schedule.from_json(built.to_json())
    assert [built.learning_rate(Progress(40, 640)) for _ in range(3)] == [first] * 3
    assert again.learning_rate(Progress(40, 640)) == first == 0.6


def test_resume_takes_one_schedule_whole() -> None:
    stored, current = schedule(), schedule(lr=0.5, lr_decay_iters=50)
    assert choose(stored, stored, override=False, use_checkpoint=False) == stored
    assert choose(stored, current, override=True, use_checkpoint=False) is current
    assert choose(stored, current, override=False, use_checkpoint=True) is stored
    with pytest.raises(UserError, match="lr: 1.0 -> 0.5.*override-opt_param-scheduler"):
        choose(stored, current, override=False, use_checkpoint=False)
    assert len(describe_change(stored, current)) == 6


def test_a_longer_run_with_the_same_curves_is_no_difference() -> None:
    assert (
        differences(schedule(lr_decay_iters=50), schedule(lr_decay_iters=50, train_iters=500)) == []
    )
    ramp = {"weight_decay_incr_style": "linear", "start_weight_decay": 0.0, "end_weight_decay": 1.0}
    longer = schedule(lr_decay_iters=50, train_iters=500, **ramp)
    assert differences(schedule(lr_decay_iters=50, **ramp), longer) == ["length: 100 -> 500"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lr": None}, "--lr is required"),
        ({"min_lr": 2.0}, "--min-lr"),
        ({"lr_warmup_init": 1.5}, "--lr-warmup-init"),
        ({"lr_warmup_fraction": 0.1, "lr_warmup_iters": 3}, "drop one"),
        ({"lr_warmup_fraction": 1.0}, "below 1"),
        ({"lr_warmup_iters": 100}, "must be shorter"),
        ({"lr_decay_samples": 10}, "give --lr-decay-iters"),
        ({"lr_warmup_samples": 10}, "give --lr-warmup-iters"),
        ({"lr_decay_style": "WSD"}, "--lr-wsd-decay-iters"),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": 101}, "from 0 to"),
        ({"start_weight_decay": 0.1}, "--weight-decay-incr-style"),
        ({"weight_decay_incr_style": "cosine", "start_weight_decay": 0.1}, "needs both"),
        (
            {
                "weight_decay_incr_style": "linear",
                "start_weight_decay": 0.2,
                "end_weight_decay": 0.1,
            },
            "--end-weight-decay",
        ),
        (
            {"override_opt_param_scheduler": True, "use_checkpoint_opt_param_scheduler": True},
            "exclude",
        ),
    ],
)
def test_what_does_not_fit_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        schedule(**fields)


@pytest.mark.parametrize(
    "fields", [{"weight_decay": -0.1}, {"clip_grad": -1.0}, {"adam_beta2": 1.0}, {"adam_eps": 0.0}]
)
def test_bad_optimizer_numbers_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(UserError, match="--"):
        OptimizerConfig(**fields)
