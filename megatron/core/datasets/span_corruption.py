"""Span corruption: spans of a text are replaced by sentinels, and are what is to be predicted.

    text      Thank you for inviting me to your party last week
    encoder   Thank you <s0> me to your party <s1> week
    target    <s0> for inviting <s1> last

Sentinels are used in order, one for each span. Putting the spans of the target where the encoder
has their sentinels gives the text back, exactly. Two ways say which spans:

``ngrams``, Megatron-LM's: words in random order, from each of which a span of a geometric number of
words (p = 0.2, at most ``max_ngram``; SpanBERT, Joshi et al. 2020, section 3.1) is taken if it fits
what is left of the share to mask and meets no span before. The draws are Megatron-core's, so the
spans are, too.

``random_spans``, T5's (Raffel et al. 2020, section 3.1.4; ``random_spans_noise_mask`` of its code):
numbers of noise tokens and of spans follow from the length, and the text alternates between parts
that stay and noise, all of random lengths of at least one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.noise_shape import NoiseShape

Tokens = npt.NDArray[np.int64]
Spans = npt.NDArray[np.int64]
"""[K, 2]: start and end of each span, in order of their places and apart or adjacent."""

GEOMETRIC = 0.2
"""Chance that a span ends with each of its words."""


@dataclass(frozen=True, kw_only=True)
class NgramLimits:
    """What bounds the spans of one text."""

    mask_prob: float
    max_ngram: int
    """Words of a span at most."""
    most_spans: int
    """Sentinels there are."""
    most_targets: int
    """Tokens of target that there is room for: those of the spans and their sentinels."""


def ngram_spans(
    starts: npt.NDArray[np.int64],
    length: int,
    target_length: int,
    limits: NgramLimits,
    random: np.random.RandomState,
) -> Spans:
    """Return spans of whole words of a text.

    A span for which no sentinel or no room in the target is left is not taken; where there is
    enough of both, as with Megatron-core, which fails otherwise, spans are equal to its.

    Args:
        starts: first token of each word, the first of which is 0.
        length: tokens of the text, at least one.
        target_length: tokens it was to have: a share of them is the most that is masked.
        limits: shares and bounds.
        random: draws an order of the words, then a length for each that is looked at.
    """
    words = len(starts)
    ends = np.append(starts[1:], length)
    share = limits.mask_prob
    budget = min(share * target_length, max(1, round(length * share)))
    order = np.arange(words)
    random.shuffle(order)
    is_masked = np.zeros(length, dtype=bool)
    spans: list[tuple[int, int]] = []
    masked = 0
    for word in order.tolist():
        if masked >= budget or len(spans) == limits.most_spans:
            break
        ngram = min(int(random.geometric(GEOMETRIC)), limits.max_ngram)
        start = int(starts[word])
        end = longest_run(ends, word, ngram, start + budget - masked)
        if end is None or is_masked[start:end].any():
            continue
        if masked + len(spans) + end - start + 1 > limits.most_targets:
            continue
        is_masked[start:end] = True
        masked += end - start
        spans.append((start, end))
    return np.array(sorted(spans), dtype=np.int64).reshape(-1, 2)


def longest_run(ends: npt.NDArray[np.int64], word: int, ngram: int, limit: float) -> int | None:
    """Return the end of the longest run of up to ``ngram`` words from ``word`` on, by ``limit``.

    None where not even the first word does.
    """
    last = min(word + ngram, len(ends)) - 1
    while last >= word:
        if ends[last] <= limit:
            return int(ends[last])
        last -= 1
    return None


def random_spans(length: int, shape: NoiseShape, random: np.random.RandomState) -> Spans:
    """Return spans of a text of ``length`` tokens; none of a text of one, of which nothing stays.

    The text begins with a part that stays and ends with a span.
    """
    if length < 2:
        return np.empty((0, 2), dtype=np.int64)
    noise, count = shape.counts(length)
    masked = _parts(noise, count, random)
    kept = _parts(length - noise, count, random)
    ends = np.cumsum(kept + masked)
    return np.stack([ends - masked, ends], axis=1)


def _parts(total: int, count: int, random: np.random.RandomState) -> npt.NDArray[np.int64]:
    """Return ``count`` positive numbers that sum to ``total``, all such rows equally likely."""
    cuts = np.sort(random.permutation(total - 1)[: count - 1]) + 1
    return np.diff(np.concatenate([[0], cuts, [total]])).astype(np.int64)


def corrupted(text: Tokens, spans: Spans, sentinels: Sequence[int]) -> tuple[Tokens, Tokens]:
    """Return what (the encoder reads, the decoder is to say) of a text, without end tokens.

    Args:
        text: [S] int64.
        spans: [K, 2], as `ngram_spans` and `random_spans` give them.
        sentinels: at least K.
    """
    assert len(spans) <= len(sentinels), f"{len(spans)} spans, {len(sentinels)} sentinels"
    starts, lengths = spans[:, 0], spans[:, 1] - spans[:, 0]
    marks = np.asarray(sentinels[: len(spans)], dtype=np.int64)
    masked = starts.repeat(lengths) + _counted(lengths)
    kept = np.ones(len(text), dtype=bool)
    kept[masked] = False
    kept[starts] = True  # where the sentinel goes
    marked = text.copy()
    marked[starts] = marks
    return marked[kept], np.insert(text[masked], np.cumsum(lengths) - lengths, marks)


def _counted(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return 0, 1, ... for each length, one after the other."""
    before = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) - before.repeat(lengths)
