"""Megatron-LM's samples for an encoder-decoder: masked words of sentences of one document."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.cache import Arrays, IndexStore
from megatron.core.datasets.checks import PROBES, lengths_mark, probed_crc32
from megatron.core.datasets.config import DataConfig
from megatron.core.datasets.key_facts import KeyFacts
from megatron.core.datasets.masked_samples import (
    MaskedIndex,
    MaskedPlan,
    Pieces,
    SentenceTexts,
    build_masked_index,
)
from megatron.core.datasets.source import TokenSource
from megatron.core.datasets.sources import SplitSource, samples_asked
from megatron.core.datasets.span_corruption import GEOMETRIC, NgramLimits
from megatron.core.datasets.split import rows_of
from megatron.core.datasets.t5 import NgramMasking, T5Dataset, T5Options
from megatron.core.datasets.token_info import TokenInfo
from megatron.core.utils import Say, UserError

INDEX_NAMES = ("sample_index", "epoch_index")
FREE_PLACES = 2
"""Places of the encoder that texts leave free, as Megatron-core's do."""


class SentenceMaker:
    """Makes data sets of masked sentences."""

    def __init__(
        self,
        config: DataConfig,
        info: TokenInfo,
        seed: int,
        store: IndexStore,
        options: T5Options,
        say: Say,
    ) -> None:
        t5 = config.t5
        self._config = config
        self._info = info
        self._seed = seed
        self._store = store
        self._options = options
        self._room = options.encoder_seq_length - FREE_PLACES
        self._limits = NgramLimits(
            mask_prob=t5.mask_prob,
            max_ngram=t5.masking_max_ngram,
            most_spans=len(options.sentinels),
            most_targets=options.decoder_seq_length - 1,
        )
        self._continues_word = info.tokenizer.continues_word()
        for line in tight_limits(self._room, self._limits):
            say(f"WARNING: {line}")

    def make(self, source: SplitSource, tokens: TokenSource, asked: int | None) -> T5Dataset:
        """Return the data set of one split of one corpus."""
        bounds = self._documents(source, tokens)
        pieces = Pieces(tokens.sequence_lengths, self._room)
        first, last = pieces.first(bounds[[0, -1]]).tolist()
        if first == last:
            raise self._empty(source, tokens, len(bounds) - 1, asked)
        short = self._config.t5.short_seq_prob
        kind = "T5Dataset" if tokens.prefix is not None else "MockT5Dataset"
        key = KeyFacts(self._config, self._info, self._seed, kind, self._room)
        description = key.describe(source, tokens, asked, short_sequence_probability=short)
        plan = MaskedPlan(room=self._room, short_seq_prob=short, seed=self._seed, asked=asked)

        def build() -> Arrays:
            return dict(zip(INDEX_NAMES, build_masked_index(pieces, bounds, plan), strict=True))

        arrays = self._store.get(
            description,
            source.split,
            content_mark(tokens.sequence_lengths, bounds),
            INDEX_NAMES,
            build,
            lambda found, trusted: check_arrays(
                found, (first, last), self._room, asked, PROBES if trusted else None
            ),
            tokens.prefix,
        )
        index = MaskedIndex(*(arrays[name] for name in INDEX_NAMES))
        texts = SentenceTexts(tokens, pieces, index, description)
        masking = NgramMasking(
            limits=self._limits,
            targets=index.sample[:, 2],
            continues_word=self._continues_word,
            seed=self._seed,
        )
        return T5Dataset(texts, masking, self._options)

    def shortfall(self, source: SplitSource, tokens: TokenSource) -> str | None:
        """Return what a split has, if one pass over it yields no sample."""
        bounds = self._documents(source, tokens)
        if tokens.sequence_lengths[bounds[0] : bounds[-1]].any():
            return None
        return f"no tokens in {len(bounds) - 1} documents"

    def _documents(self, source: SplitSource, tokens: TokenSource) -> npt.NDArray[np.int64]:
        """Return the bounds of a split's documents, as numbers of rows."""
        start, end = rows_of(source.share, len(tokens.documents) - 1)
        return tokens.documents[start : end + 1]

    def _empty(
        self, source: SplitSource, tokens: TokenSource, count: int, asked: int | None
    ) -> UserError:
        how = f"--split {self._config.split} gives it " if source.shared else "it has "
        return UserError(
            f"the {source.split} split of {tokens.name} is empty: {how}{count} of "
            f"{len(tokens.documents) - 1} documents and no tokens, but {samples_asked(asked)} "
            "asked of it; give the split a larger share, or ask nothing of it (--eval-iters 0 for "
            "validation and test)"
        )


def tight_limits(room: int, limits: NgramLimits) -> list[str]:
    """Return what keeps samples of full length from being masked as much as is asked for."""
    masked = max(1, round(room * limits.mask_prob))
    mean = (1 - (1 - GEOMETRIC) ** limits.max_ngram) / GEOMETRIC
    spans = math.ceil(masked / mean)
    text = f"--mask-prob {limits.mask_prob} of {room} tokens is {masked}, in about {spans} spans"
    lines = []
    if masked + spans > limits.most_targets:
        lines.append(
            f"{text}, which --decoder-seq-length ({limits.most_targets + 1}) has no room for: "
            f"fewer are masked; it takes {masked + spans + 1} or more"
        )
    if spans > limits.most_spans:
        lines.append(
            f"{text}, but the tokenizer has {limits.most_spans} sentinel tokens: fewer are masked; "
            f"give --vocab-extra-ids {spans} or more"
        )
    return lines


def content_mark(lengths: npt.NDArray[Any], documents: npt.NDArray[np.int64]) -> dict[str, Any]:
    """Return what tells a corpus from another under the same path, in a moment's time."""
    rows = int(documents[0]), int(documents[-1])
    return {**lengths_mark(lengths, rows), "documents_crc32": probed_crc32(np.diff(documents))}


def check_arrays(
    arrays: Arrays,
    pieces: tuple[int, int],
    room: int,
    asked: int | None,
    probes: int | None,
) -> str | None:
    """Return why index arrays from disk cannot be this split's, or None.

    Args:
        arrays: those of `INDEX_NAMES`.
        pieces: the split's first piece, and the one after its last.
        room: tokens of a sample at most.
        asked: samples wanted; None for one epoch.
        probes: samples to look at, where the content is known to be the corpus'; None for all.
    """
    sample, epoch = (arrays[name] for name in INDEX_NAMES)
    if sample.ndim != 2 or sample.shape[1] != 3 or sample.dtype.kind != "i":
        return f"sample_index has shape {sample.shape} and type {sample.dtype}"
    if epoch.ndim != 1 or len(epoch) < 2 or epoch.dtype != np.int64 or epoch[-1] != len(sample):
        return f"epoch_index does not end at {len(sample)} samples"
    if len(sample) < (asked or 1):
        return f"sample_index has {len(sample)} samples of {asked}"
    some = sample[:: 1 if probes is None else max(1, len(sample) // probes)]
    if some[:, 0].min() < pieces[0] or some[:, 1].max() > pieces[1]:
        return f"sample_index leaves pieces {pieces[0]} to {pieces[1]}"
    if (some[:, 0] >= some[:, 1]).any() or some[:, 2].max() > room:
        return f"sample_index has empty samples, or longer ones than {room} tokens"
    return None
