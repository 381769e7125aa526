"""Span corruption: the text comes back exactly; how much is masked, in which spans."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets.draws import generator
from megatron.core.datasets.noise_shape import NoiseShape
from megatron.core.datasets.span_corruption import (
    NgramLimits,
    corrupted,
    ngram_spans,
    random_spans,
)
from tests.restored import restored

SENTINELS = tuple(range(1000, 1600))
T5 = NoiseShape(density=0.15, mean_span_length=3.0)


def limits(**values: float) -> NgramLimits:
    given = {"mask_prob": 0.15, "max_ngram": 10, "most_spans": 600, "most_targets": 10_000}
    return NgramLimits(**{**given, **values})  # type: ignore[arg-type]


def check_apart(spans: np.ndarray, length: int) -> None:
    """Spans are not empty, lie inside the text, in order, and do not overlap."""
    flat = spans.ravel().tolist()
    assert flat == sorted(flat) and all(0 <= i <= length for i in flat)
    assert (spans[:, 0] < spans[:, 1]).all()


def test_the_example_of_the_paper() -> None:
    """Raffel et al. 2020, figure 2, without the closing sentinel, which T5's code leaves out."""
    words = "Thank you for inviting me to your party last week".split()
    text = np.arange(len(words))
    encoder, target = corrupted(text, np.array([[2, 4], [8, 9]]), SENTINELS)

    def spelled(ids: np.ndarray) -> str:
        return " ".join("<X>" if i == 1000 else "<Y>" if i == 1001 else words[i] for i in ids)

    assert spelled(encoder) == "Thank you <X> me to your party <Y> week"
    assert spelled(target) == "<X> for inviting <Y> last"
    assert restored(encoder, target, SENTINELS).tolist() == text.tolist()


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 400), st.floats(0.01, 0.99), st.floats(1.0, 20.0), st.integers(0, 2**40))
def test_random_spans(length: int, density: float, mean: float, number: int) -> None:
    """The text comes back; shares and numbers are those of T5's formula, exactly."""
    shape = NoiseShape(density=density, mean_span_length=mean)
    spans = random_spans(length, shape, generator(1234, number))
    check_apart(spans, length)
    noise = min(max(int(np.round(length * density)), 1), length - 1)
    count = max(int(np.round(noise / mean)), 1)
    assert (spans[:, 1] - spans[:, 0]).sum() == noise
    assert len(spans) == min(count, noise, length - noise)
    # Kept and masked parts take turns, none of them empty: spans never touch.
    assert spans[0, 0] > 0 and spans[-1, 1] == length
    assert (spans[1:, 0] > spans[:-1, 1]).all()
    text = np.arange(length)
    encoder, target = corrupted(text, spans, SENTINELS)
    assert restored(encoder, target, SENTINELS).tolist() == text.tolist()
    lengths = (len(encoder) + 1, len(target) + 1)
    assert lengths == shape.lengths(length)


def test_lengths_that_t5_publishes() -> None:
    """512 input tokens are made of 568 of text, with 114 of target (T5's code says so)."""
    assert T5.longest_text(512) == 568
    assert T5.lengths(568) == (512, 114)
    assert T5.counts(568) == (85, 28)


@pytest.mark.parametrize("encoder_length", [3, 4, 7, 16, 100, 513])
@pytest.mark.parametrize(("density", "mean"), [(0.15, 3.0), (0.5, 32.0), (0.9, 1.0)])
def test_the_longest_text_is_the_longest(encoder_length: int, density: float, mean: float) -> None:
    shape = NoiseShape(density=density, mean_span_length=mean)
    fitting = [n for n in range(2, 12_000) if shape.lengths(n)[0] <= encoder_length]
    assert shape.longest_text(encoder_length) == max(fitting)
    assert shape.longest_text(2) == 0


def test_all_ways_to_part_a_text_are_equally_likely() -> None:
    """5 noise tokens of 10 in 2 spans: 4 ways to part the noise, 4 to part the rest."""
    shape = NoiseShape(density=0.5, mean_span_length=2.5)
    found = Counter(
        tuple(random_spans(10, shape, generator(3, i)).ravel().tolist()) for i in range(1600)
    )
    wanted = {(a, a + m, 5 + m, 10) for a in range(1, 5) for m in range(1, 5)}
    assert set(found) == wanted
    assert all(abs(count - 100) < 50 for count in found.values())  # five standard deviations


def test_a_text_of_one_token_has_no_random_span() -> None:
    assert random_spans(1, T5, generator(0, 0)).shape == (0, 2)
    encoder, target = corrupted(np.array([7]), np.empty((0, 2), dtype=np.int64), SENTINELS)
    assert encoder.tolist() == [7] and target.tolist() == []


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.booleans(), min_size=1, max_size=200),
    st.floats(0.01, 0.9),
    st.integers(1, 12),
    st.integers(0, 2**31),
)
def test_ngrams(continues: list[bool], prob: float, most: int, seed: int) -> None:
    """The text comes back; spans are whole words, few enough, and mask no more than asked."""
    length = len(continues)
    starts = np.flatnonzero(~np.array([False, *continues[1:]]))
    bounds = limits(mask_prob=prob, max_ngram=most)
    spans = ngram_spans(starts, length, length, bounds, np.random.RandomState(seed))
    check_apart(spans, length)
    edges = {*starts.tolist(), length}
    assert set(spans.ravel().tolist()) <= edges
    for start, end in spans.tolist():
        assert 1 <= np.count_nonzero((starts >= start) & (starts < end)) <= most
    masked = int((spans[:, 1] - spans[:, 0]).sum())
    assert masked <= min(prob * length, max(1, round(prob * length)))
    if len(starts) == length and prob * length >= 1:  # words of one token: the share is used up
        assert masked == min(int(prob * length), max(1, round(prob * length)))
    text = np.arange(length)
    assert restored(*corrupted(text, spans, SENTINELS), SENTINELS).tolist() == text.tolist()


def test_spans_stop_at_sentinels_and_at_the_decoders_room() -> None:
    starts = np.arange(500)
    for bounds in (limits(most_spans=3), limits(most_targets=20), limits(most_targets=2)):
        for seed in range(20):
            spans = ngram_spans(starts, 500, 500, bounds, np.random.RandomState(seed))
            assert 1 <= len(spans) <= bounds.most_spans
            assert (spans[:, 1] - spans[:, 0] + 1).sum() <= bounds.most_targets


def test_lengths_of_spans_are_geometric() -> None:
    """First spans of long texts: P(n) = 0.2 x 0.8^(n-1), and what is left at ``max_ngram``."""
    starts, bounds = np.arange(4000), limits(most_spans=1, max_ngram=5)
    lengths = [
        int(np.diff(ngram_spans(starts, 4000, 4000, bounds, np.random.RandomState(i)))[0, 0])
        for i in range(1000)
    ]
    found = np.bincount(lengths, minlength=6)[1:] / 1000
    wanted = [0.2, 0.16, 0.128, 0.1024, 0.4096]
    np.testing.assert_allclose(found, wanted, atol=0.06)  # four standard deviations
