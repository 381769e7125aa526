"""Samples for an encoder that learns to say which words were masked in a text (BERT).

    tokens          [S] int64    [CLS] A [SEP], or [CLS] A [SEP] B [SEP], words masked, padded
    token_types     [S] int64    1 at B and its [SEP], else 0
    labels          [S] int64    at masked places the token that stood there, else 0
    loss_mask       [S] float32  1 at masked places
    cu_seqlens      [3] int32    0, number of tokens, S: tokens attend to tokens, padding to padding
    sentence_order  []  int64    1 where A comes after B in the document, else 0

S is ``--seq-length``. The last one is there, and B, unless ``--bert-no-binary-head`` says that
samples are of one part. A and B are neighbouring runs of sentences of one document, cut at random
ends, the longer one first, until both have room. What a sample is follows from the seed and its
number alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.core.datasets.gpt import Place, Sample, check_ids
from megatron.core.datasets.masked_samples import SentenceTexts
from megatron.core.datasets.span_corruption import Tokens
from megatron.core.datasets.word_masking import WordMasking

FRAME = 3
"""Places that are kept for [CLS] and two [SEP], also where there is one part."""


@dataclass(frozen=True, kw_only=True)
class BertOptions:
    """How sentences become a sample."""

    seq_length: int
    vocab_size: int
    """Ids in use: a token from here on is an error."""
    cls: int
    sep: int
    pad: int
    in_order: bool
    """Samples have two parts, and say whether these are in order."""


class BertDataset:
    """Sample ``i`` of one split of one corpus; items are as the module's docstring says."""

    def __init__(
        self, texts: SentenceTexts, masking: WordMasking, options: BertOptions, seed: int
    ) -> None:
        self.texts = texts
        self.masking = masking
        self.options = options
        self.seed = seed
        self.source = texts.source
        self.description: dict[str, Any] = texts.description

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def samples_per_epoch(self) -> float:
        """Samples in one pass over the corpus, on average."""
        return self.texts.samples_per_epoch

    def __getitem__(self, i: int) -> Sample:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)} of {self.source.name}")
        text = self.text(i)
        check_ids(text, self.options.vocab_size, self.source, self.places(i))
        random = np.random.RandomState((self.seed + i) % 2**32)
        target = self.texts.target(i)
        return self._sample(np.split(text, self.texts.cuts(i)), target, random)

    def text(self, i: int) -> Tokens:
        """Return the sentences that sample ``i`` is made of, whole, one after the other."""
        return self.texts.whole(i)

    def places(self, i: int) -> Iterator[Place]:
        """Yield where they stand, row by row."""
        return self.texts.whole_places(i)

    def _sample(
        self, sentences: list[Tokens], target: int, random: np.random.RandomState
    ) -> Sample:
        options = self.options
        parts, is_swapped = [np.concatenate(sentences)], False
        if options.in_order:
            parts, is_swapped = _two_parts(sentences, random)
        parts = _trimmed(parts, target, random)
        framed = np.concatenate(
            [[options.cls], *(x for part in parts for x in (part, [options.sep]))]
        ).astype(np.int64)
        hidden, places = self.masking.hide(framed, target, random)
        count, length = len(framed), options.seq_length
        assert count <= length, f"{count} tokens for {length} places"
        sample: Sample = {
            "tokens": np.full(length, options.pad, dtype=np.int64),
            "token_types": np.zeros(length, dtype=np.int64),
            "labels": np.zeros(length, dtype=np.int64),
            "loss_mask": np.zeros(length, dtype=np.float32),
            "cu_seqlens": np.array([0, count, length], dtype=np.int32),
        }
        sample["tokens"][:count] = hidden
        sample["token_types"][2 + len(parts[0]) : count] = 1
        sample["labels"][places] = framed[places]
        sample["loss_mask"][places] = 1
        if options.in_order:
            sample["sentence_order"] = np.array(is_swapped, dtype=np.int64)
        return sample


def _two_parts(sentences: list[Tokens], random: np.random.RandomState) -> tuple[list[Tokens], bool]:
    """Return two runs of sentences, and whether they are swapped; every second time they are."""
    count = len(sentences)
    assert count > 1, "a sample of two parts has two sentences"
    pivot = int(random.randint(low=1, high=count)) if count > 2 else 1
    parts = [np.concatenate(sentences[:pivot]), np.concatenate(sentences[pivot:])]
    is_swapped = bool(random.random_sample() < 0.5)
    return (parts[::-1] if is_swapped else parts), is_swapped


def _trimmed(parts: list[Tokens], target: int, random: np.random.RandomState) -> list[Tokens]:
    """Return the parts with ends cut off, a token at a time, until they have ``target`` tokens."""
    bounds = [[0, len(part)] for part in parts]
    sizes = [len(part) for part in parts]
    if len(parts) == 1:
        # An empty second part, which is never the longer one.
        sizes.append(0)
    while sum(sizes) > target:
        longer = 0 if sizes[0] > sizes[1] else 1
        if random.random_sample() < 0.5:
            bounds[longer][0] += 1
        else:
            bounds[longer][1] -= 1
        sizes[longer] -= 1
    return [part[start:end] for part, (start, end) in zip(parts, bounds, strict=True)]
