"""Batch-size schedules: exact arithmetic on consumed samples, against a loop that counts."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.utils import UserError
from megatron.training.batch_size import (
    BatchSizes,
    parse_steps,
    ramp,
    round_down,
    steps_in_samples,
)
from megatron.training.config import RunConfig


def loop(start: int, increment: int, samples: int, final: int, iterations: int) -> list[int]:
    """Return the size of each iteration as the flag's definition says, in exact fractions."""
    sizes, consumed = [], 0
    for _ in range(iterations):
        if consumed >= samples or start == final:
            size = final
        else:
            share = Fraction(samples, (final - start) // increment)
            size = start + int(consumed / share) * increment
        sizes.append(size)
        consumed += size
    return sizes


@given(
    start=st.integers(1, 40),
    increment=st.integers(1, 40),
    count=st.integers(0, 30),
    samples=st.integers(0, 3000),
)
def test_a_ramp_is_the_loop_that_defines_it(
    start: int, increment: int, count: int, samples: int
) -> None:
    final = start + count * increment
    sizes = ramp(start, increment, samples, final)
    expected = loop(start, increment, samples, final, 60)
    consumed = 0
    for iteration, size in enumerate(expected):
        assert sizes.at(consumed) == size
        assert sizes.samples(iteration) == consumed
        assert sizes.iterations(consumed) == iteration
        assert sizes.iterations(consumed + size - 1) == iteration
        consumed += size


def test_lr_05_the_iterations_of_a_ramp() -> None:
    sizes = ramp(8, 8, 160, 16)
    assert list(sizes.runs()) == [(0, 0, 8, 20), (20, 160, 16, None)]
    assert sizes.samples(100) == 20 * 8 + 80 * 16
    assert sizes.iterations(1440) == 100


def test_a_big_batch_may_jump_over_a_step() -> None:
    sizes = BatchSizes((0, 10, 12), (100, 3, 7))
    assert list(sizes.runs()) == [(0, 0, 100, 1), (1, 100, 7, None)]
    assert sizes.samples(2) == 107


def test_steps_count_tokens_with_suffixes() -> None:
    assert parse_steps("0:768 250B:1536, 1.5T:3072") == [
        (0, 768),
        (250 * 10**9, 1536),
        (1500 * 10**9, 3072),
    ]
    sizes = steps_in_samples("0:4 100:8 1K:16", seq_length=32)
    # The first sample that starts at or after 100 tokens is number 4, of 1000 tokens number 32.
    assert sizes == BatchSizes((0, 4, 32), (4, 8, 16))


@pytest.mark.parametrize(
    "text",
    ["", "0", "0:", "0:x", "0:0", "1:2", "0:1 5:2 5:3", "0:1 9:2 5:3", "0:1 1.5:2", "0:1 -5:2"],
)
def test_bad_steps_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="--step-batch-size-schedule"):
        parse_steps(text)


def test_thresholds_within_one_sample_are_refused() -> None:
    with pytest.raises(UserError, match="--seq-length"):
        steps_in_samples("0:4 10:8 20:16", seq_length=32)


def test_sizes_are_rounded_down_but_not_to_nothing() -> None:
    assert round_down(ramp(2, 5, 10, 12), 4).sizes == (4, 4, 12)


def test_a_run_of_samples_is_its_full_iterations() -> None:
    config = RunConfig.resolve(
        num_layers=1, hidden_size=8, num_attention_heads=1, seq_length=8, micro_batch_size=2,
        global_batch_size=4, rampup_batch_size=(2, 2, 6), train_samples=21, lr=1.0,
    )  # fmt: skip
    # 2 + 2 + 2, then 4 + 4 + 4 of the 21 samples; 3 are too few for another.
    assert config.total_iterations == 6
    assert config.total_samples == 18
