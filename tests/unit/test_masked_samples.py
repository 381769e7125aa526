"""Which sentences make a sample: a plain walk as reference, and what no document may break."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets.draws import Twister64, permutation64, words
from megatron.core.datasets.masked_samples import (
    MaskedIndex,
    MaskedPlan,
    Pieces,
    SentenceTexts,
    build_masked_index,
)
from megatron.core.datasets.source import Tokens
from megatron.core.utils import UserError


def test_the_generators_are_those_of_the_c_plus_plus_standard() -> None:
    """The 10000th word from the default seed is given there (26.5.6 of C++17)."""
    twister = Twister64(5489)
    numbers = np.concatenate([twister.block() for _ in range(10_000 // 312 + 1)])
    assert int(numbers[9999]) == 9981545732273789042
    stream = words(5489)
    assert [next(stream) for _ in range(10_000)][-1] == 4123659995


def test_a_permutation_is_one() -> None:
    for length in (0, 1, 2, 311, 312, 313, 1000):
        order = permutation64(length, 7)
        assert sorted(order.tolist()) == list(range(length))
    assert permutation64(1000, 7).tolist() != permutation64(1000, 8).tolist()


class Documents:
    """A source of made-up rows: token ``t`` of row ``r`` is ``1000 r + t``."""

    name, row_name, prefix = "documents", "sentence", None

    def __init__(self, documents: list[list[int]]) -> None:
        lengths = [length for document in documents for length in document]
        self.sequence_lengths = np.array(lengths, dtype=np.int32)
        self.documents = np.cumsum([0, *map(len, documents)]).astype(np.int64)

    def join(self, rows: np.ndarray, first: int, last: int) -> Tokens:
        parts = [1000 * int(r) + np.arange(self.sequence_lengths[r]) for r in rows]
        parts[-1] = parts[-1][:last]
        parts[0] = parts[0][first:]
        return np.concatenate(parts).astype(np.int64)


def build(
    documents: list[list[int]], room: int, asked: int | None = None, **plan: float
) -> tuple[MaskedIndex, SentenceTexts]:
    source = Documents(documents)
    pieces = Pieces(source.sequence_lengths, room)
    given = {"short_seq_prob": 0.0, "seed": 3, **plan}
    made = MaskedPlan(room=room, asked=asked, **given)  # type: ignore[arg-type]
    index = build_masked_index(pieces, source.documents, made)
    return index, SentenceTexts(source, pieces, index)


def walk(documents: list[list[int]], room: int, least: int) -> Iterator[tuple[int, int]]:
    """Yield (first, after last) sentence of each sample, one sentence after the other."""
    first = 0
    for document in documents:
        start, total = first, 0
        if len(document) >= least:
            for number, length in enumerate(document):
                total += length
                here, left = first + number, len(document) - number - 1
                enough = total >= room and here - start + 1 >= least and left > 1
                if enough or not left:
                    yield start, here + 1
                    start, total = here + 1, 0
        first += len(document)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 9), min_size=0, max_size=8), min_size=1, max_size=12),
    st.integers(9, 30),
    st.integers(1, 3),
)
def test_sentences_are_joined_as_a_plain_walk_joins_them(
    documents: list[list[int]], room: int, least: int
) -> None:
    expected = sorted(walk(documents, room, least))
    if not expected:
        with pytest.raises(UserError, match="none of"):
            build(documents, room, min_sentences=least)
        return
    index, texts = build(documents, room, min_sentences=least)
    assert sorted((a, b) for a, b, _ in index.sample.tolist()) == expected
    assert index.epoch.tolist() == [0, len(expected)]
    for i, (first, last, target) in enumerate(index.sample.tolist()):
        lengths = texts.source.sequence_lengths
        whole = [1000 * row + t for row in range(first, last) for t in range(lengths[row])]
        assert texts.text(i).tolist() == whole[:target]
        placed = [1000 * row + t for row, a, b in texts.places(i) for t in range(a, b)]
        assert placed == whole[:target]


def test_epochs_and_short_samples() -> None:
    documents = [[5] * 4] * 50
    index, _ = build(documents, 20, asked=900, short_seq_prob=0.25, seed=11)
    per_epoch = np.diff(index.epoch)
    assert index.epoch[-1] == len(index.sample) >= 900 > index.epoch[-2]
    assert per_epoch.min() >= 50
    targets = index.sample[:, 2]
    short = targets[targets < 20]
    assert short.min() >= 2
    # 1 in 4 is drawn from 2 to 20, so 18 in 19 of those are shorter; four standard deviations.
    assert abs(len(short) / len(targets) - 0.25 * 18 / 19) < 0.06
    again, _ = build(documents, 20, asked=900, short_seq_prob=0.25, seed=11)
    other, _ = build(documents, 20, asked=900, short_seq_prob=0.25, seed=12)
    assert np.array_equal(index.sample, again.sample)
    assert not np.array_equal(index.sample[:50], other.sample[:50])


def test_over_long_documents_are_cut_and_lose_nothing() -> None:
    """Documents that nobody split, of up to many times the room: each token is in one sample."""
    documents = [[1], [10], [11], [25], [100]]
    index, texts = build(documents, 10)
    read = sorted(t for i in range(len(texts)) for t in texts.text(i).tolist())
    assert read == [1000 * r + t for r, (n,) in enumerate(documents) for t in range(n)]
    sizes = sorted(len(texts.text(i)) for i in range(len(texts)))
    assert sizes == [1, 1, 5, *[10] * 14] and len(index.sample) == 17


def test_a_long_sentence_among_others_does_not_drop_the_document() -> None:
    _, texts = build([[4, 35, 3, 6, 2]], 10)
    read = sorted(t for i in range(len(texts)) for t in texts.text(i).tolist())
    assert {0, 1000, 1034, 2000, 3000} <= set(read)
    assert all(0 < len(texts.text(i)) <= 10 for i in range(len(texts)))


def test_empty_sentences_and_documents_give_no_sample() -> None:
    documents = [[], [0], [0, 0], [10, 0, 0], [0, 3, 0], []]
    _, texts = build(documents, 10)
    read = sorted(texts.text(i).tolist() for i in range(len(texts)))
    assert read == [[3000 + t for t in range(10)], [7000, 7001, 7002]]


def test_ds_08_documents_of_one_sentence() -> None:
    """Fine for a sample of one sentence; where two are needed, refused at once, and counted."""
    documents = [[5]] * 10
    index, _ = build(documents, 20, asked=25)
    assert len(index.sample) == 30
    with pytest.raises(UserError, match="none of 11 documents") as caught:
        build([*documents, []], 20, asked=25, min_sentences=2)
    assert "1 are empty and 10 have fewer" in str(caught.value)
    assert "--split-sentences" in str(caught.value)


def test_more_samples_than_memory_holds_are_refused() -> None:
    with pytest.raises(UserError, match="does not fit into memory"):
        build([[5]], 20, asked=2**60)
