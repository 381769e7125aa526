"""The loss scale against known sequences, a reference written here, and torch's own update."""

import json
from collections.abc import Sequence

import pytest
import torch

from megatron.core.precision.config import PrecisionConfig
from megatron.core.precision.loss_scaler import LossScaler


def scaler(**settings: object) -> LossScaler:
    return LossScaler(PrecisionConfig.resolve(**{"fp16": True, **settings}))


def scales(one: LossScaler, overflows: Sequence[bool]) -> list[float]:
    """Return the scale after each iteration."""
    found = []
    for overflow in overflows:
        one.update(overflow=overflow)
        found.append(one.scale)
    return found


def by_episodes(
    overflows: Sequence[bool], initial: float, minimum: float, window: int, hysteresis: int
) -> list[float]:
    """Return what the rules say, each iteration from the whole history.

    The history is cut where the scale grew: after ``window`` iterations without an overflow,
    counted from the last overflow or growth. In such an episode the first ``hysteresis - 1``
    overflows cost nothing, and each later one half of the scale.
    """
    found = []
    for count in range(1, len(overflows) + 1):
        scale, episode = initial, list[bool]()
        for overflow in overflows[:count]:
            episode.append(overflow)
            if overflow and sum(episode) >= hysteresis:
                scale = max(scale / 2, minimum)
            if len(episode) >= window and not any(episode[-window:]):
                scale, episode = 2 * scale, []
        found.append(scale)
    return found


GOOD, BAD = False, True


@pytest.mark.parametrize(
    ("settings", "overflows", "expected"),
    [
        # The first overflow is borne, each that follows halves, good steps in between or not.
        ({}, [BAD, BAD, BAD, GOOD, BAD], [2**32, 2**31, 2**30, 2**30, 2**29]),
        ({"hysteresis": 1}, [BAD, GOOD, BAD], [2**31, 2**31, 2**30]),
        # Growth makes patience new; an overflow makes the count of good steps new.
        (
            {"initial_loss_scale": 8, "loss_scale_window": 2},
            [GOOD, BAD, GOOD, GOOD, BAD, BAD],
            [8, 8, 8, 16, 16, 8],
        ),
        ({"initial_loss_scale": 3, "min_loss_scale": 2, "hysteresis": 1}, [BAD] * 3, [2, 2, 2]),
        ({"initial_loss_scale": 4, "loss_scale_window": 1}, [GOOD, GOOD], [8, 16]),
    ],
)
def test_known_sequences(
    settings: dict[str, object], overflows: list[bool], expected: list[float]
) -> None:
    assert scales(scaler(**settings), overflows) == expected


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
@pytest.mark.parametrize("window", [1, 2, 5])
def test_random_sequences_follow_the_rules(window: int, hysteresis: int) -> None:
    generator = torch.Generator().manual_seed(10 * window + hysteresis)
    for share in (0.1, 0.4, 0.8):
        overflows = (torch.rand(120, generator=generator) < share).tolist()
        one = scaler(
            initial_loss_scale=1000,
            min_loss_scale=0.3,
            loss_scale_window=window,
            hysteresis=hysteresis,
        )
        assert scales(one, overflows) == by_episodes(overflows, 1000, 0.3, window, hysteresis)


def test_without_patience_it_is_torchs_update() -> None:
    """`torch.amp.GradScaler` has the same rules, but for hysteresis and a minimum."""
    generator = torch.Generator().manual_seed(1)
    overflows = (torch.rand(300, generator=generator) < 0.2).tolist()
    scale, tracker = torch.tensor(65536.0), torch.tensor(0, dtype=torch.int32)
    expected = []
    for overflow in overflows:
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(overflow)), 2.0, 0.5, 4)
        expected.append(scale.item())
    one = scaler(initial_loss_scale=65536, min_loss_scale=1e-30, loss_scale_window=4, hysteresis=1)
    assert scales(one, overflows) == expected


def test_a_stored_scale_goes_on_as_if_nothing_had_been() -> None:
    generator = torch.Generator().manual_seed(2)
    overflows = (torch.rand(60, generator=generator) < 0.3).tolist()
    settings = {"initial_loss_scale": 1000.1, "loss_scale_window": 3}
    straight = scales(scaler(**settings), overflows)
    for at in range(60):
        before, after = scaler(**settings), scaler(initial_loss_scale=7, loss_scale_window=3)
        scales(before, overflows[:at])
        after.load_state(json.loads(json.dumps(before.state())))
        assert scales(after, overflows[at:]) == straight[at:]


def test_a_constant_scale_stays_and_stores_nothing() -> None:
    for settings in ({"loss_scale": 128}, {"loss_scale": 128, "fp16": False, "bf16": True}):
        one = scaler(**settings)
        assert scales(one, [BAD, BAD, GOOD]) == [128] * 3
        assert one.state() == {} and not one.can_fall
        one.load_state(scaler().state())
        assert one.scale == 128
    for settings in ({"fp16": False}, {"fp16": False, "bf16": True, "loss_scale": 0}):
        assert scaler(**settings).scale == 1


def test_a_run_that_had_no_scale_starts_with_the_flags() -> None:
    one = scaler(initial_loss_scale=64)
    one.load_state({})
    assert one.scale == 64


def test_a_scale_can_fall_until_its_minimum() -> None:
    one = scaler(initial_loss_scale=4, hysteresis=1)
    found = []
    for _ in range(4):
        found.append(one.can_fall)
        one.update(overflow=True)
    assert found == [True, True, False, False]
