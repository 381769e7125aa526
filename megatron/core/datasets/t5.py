"""Samples for an encoder-decoder that learns to say what spans were taken out of a text (T5).

    encoder_tokens  [S] int64    text with sentinels, padded
    encoder_valid   [S] bool     True at tokens, False at padding
    decoder_tokens  [T] int64    begin, then the target, padded: what the decoder reads
    labels          [T] int64    the target, then eos; 0 at padding
    loss_mask       [T] float32  1 where there is a label, 0 at padding

S is ``--encoder-seq-length``, T is ``--decoder-seq-length``. Self-attention of the encoder and
cross-attention may look at ``encoder_valid`` only; the decoder's own looks back, and its padding
stands at the end, so that no token sees it. Validity goes by place, so a token of the text may have
the padding's id.

The decoder begins with the tokenizer's bos or, as in T5, whose vocabulary has none, with padding.
With random spans the encoder's tokens end with eos, as T5's do; with n-grams they do not, as
Megatron-LM's. What is masked of sample ``i`` follows from the seed and ``i`` alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.draws import generator
from megatron.core.datasets.gpt import Place, Sample, check_ids
from megatron.core.datasets.noise_shape import NoiseShape
from megatron.core.datasets.source import TokenSource
from megatron.core.datasets.span_corruption import (
    NgramLimits,
    Spans,
    Tokens,
    corrupted,
    ngram_spans,
    random_spans,
)


class Texts(Protocol):
    """Numbered texts of a corpus, of which samples are made."""

    source: TokenSource
    description: dict[str, Any]

    def __len__(self) -> int: ...

    @property
    def samples_per_epoch(self) -> float:
        """Texts in one pass over the corpus."""

    def text(self, i: int) -> Tokens:
        """Return the tokens of text ``i``."""

    def places(self, i: int) -> Iterator[Place]:
        """Yield where they stand, row by row."""


class Masking(Protocol):
    """What chooses the spans of a text."""

    def spans(self, i: int, text: Tokens) -> Spans:
        """Return the spans of text ``i``: [K, 2]."""


@dataclass(frozen=True, kw_only=True)
class T5Options:
    """How a text becomes a sample."""

    encoder_seq_length: int
    decoder_seq_length: int
    vocab_size: int
    """Ids in use: a token from here on is an error."""
    begin: int
    """Token that the decoder begins with."""
    eos: int
    pad: int
    sentinels: tuple[int, ...]
    encoder_ends: bool
    """Whether the encoder's tokens end with eos."""


@dataclass(frozen=True, kw_only=True)
class NgramMasking:
    """Spans of words, drawn as Megatron-core draws them."""

    limits: NgramLimits
    targets: npt.NDArray[Any]
    """Length that each text was to have."""
    continues_word: npt.NDArray[np.bool_] | None
    """By id, whether a token goes on with a word; None where tokens are not parts of words."""
    seed: int

    def spans(self, i: int, text: Tokens) -> Spans:
        random = np.random.RandomState((self.seed + i) % 2**32)
        starts = np.arange(len(text))
        if self.continues_word is not None:
            begins = ~self.continues_word[text]
            begins[:1] = True
            starts = np.flatnonzero(begins)
        return ngram_spans(starts, len(text), int(self.targets[i]), self.limits, random)


@dataclass(frozen=True, kw_only=True)
class RandomMasking:
    """Spans at random places, as T5's."""

    shape: NoiseShape
    seed: int

    def spans(self, i: int, text: Tokens) -> Spans:
        return random_spans(len(text), self.shape, generator(self.seed, i))


class T5Dataset:
    """Sample ``i`` of one split of one corpus; items are as the module's docstring says."""

    def __init__(self, texts: Texts, masking: Masking, options: T5Options) -> None:
        self.texts = texts
        self.masking = masking
        self.options = options
        self.source = texts.source
        self.description = texts.description

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def samples_per_epoch(self) -> float:
        """Samples in one pass over the corpus."""
        return self.texts.samples_per_epoch

    def __getitem__(self, i: int) -> Sample:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)} of {self.source.name}")
        text = self.text(i)
        check_ids(text, self.options.vocab_size, self.source, self.places(i))
        return make_t5_sample(text, self.masking.spans(i, text), self.options)

    def text(self, i: int) -> Tokens:
        """Return the text that sample ``i`` is made of."""
        return self.texts.text(i)

    def places(self, i: int) -> Iterator[Place]:
        """Yield where the text of sample ``i`` stands, row by row."""
        return self.texts.places(i)


def make_t5_sample(text: Tokens, spans: Spans, options: T5Options) -> Sample:
    """Return the sample made of ``text`` by taking ``spans`` out of it."""
    encoder, target = corrupted(text, spans, options.sentinels)
    if options.encoder_ends:
        encoder = np.append(encoder, options.eos)
    labels = np.append(target, options.eos)
    decoder = np.insert(target, 0, options.begin)
    length = options.decoder_seq_length
    encoder_tokens, encoder_valid = _padded(encoder, options.encoder_seq_length, options.pad)
    decoder_tokens, counts = _padded(decoder, length, options.pad)
    return {
        "encoder_tokens": encoder_tokens,
        "encoder_valid": encoder_valid,
        "decoder_tokens": decoder_tokens,
        "labels": _padded(labels, length, 0)[0],
        "loss_mask": counts.astype(np.float32),
    }


def _padded(tokens: Tokens, length: int, pad: int) -> tuple[Tokens, npt.NDArray[np.bool_]]:
    assert len(tokens) <= length, f"{len(tokens)} tokens for {length} places"
    padded = np.full(length, pad, dtype=np.int64)
    padded[: len(tokens)] = tokens
    return padded, np.arange(length) < len(tokens)
