"""The sentences of one corpus, joined to texts of masked samples: its index, from flags."""

from dataclasses import dataclass, field
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
from megatron.core.datasets.sources import SplitSource, empty_split
from megatron.core.datasets.split import rows_of
from megatron.core.datasets.token_info import TokenInfo

INDEX_NAMES = ("sample_index", "epoch_index")


@dataclass(frozen=True, kw_only=True)
class Joining:
    """What texts are made for."""

    kind: str
    """Class of the samples, in the cache's names."""
    room: int
    """Tokens of a text at most."""
    min_sentences: int = 1
    """Sentences that a text needs; documents of fewer give none."""
    key: dict[str, Any] = field(default_factory=dict)
    """What the samples depend on besides, in the cache's names."""


class SentenceBuilder:
    """Builds the texts of one split of one corpus."""

    def __init__(
        self, config: DataConfig, info: TokenInfo, seed: int, store: IndexStore, joining: Joining
    ) -> None:
        self._config = config
        self._info = info
        self._seed = seed
        self._store = store
        self._joining = joining

    def build(self, source: SplitSource, tokens: TokenSource, asked: int | None) -> SentenceTexts:
        """Return the texts of one split of one corpus.

        Raises:
            UserError: there are none.
        """
        joining = self._joining
        room, least = joining.room, joining.min_sentences
        bounds = self._documents(source, tokens)
        pieces = Pieces(tokens.sequence_lengths, room)
        first, last = pieces.first(bounds[[0, -1]]).tolist()
        if first == last:
            taken = f"{len(bounds) - 1} of {len(tokens.documents) - 1} documents"
            raise empty_split(source, tokens.name, self._config, taken, asked)
        short = self._config.masking.short_seq_prob
        kind = joining.kind if tokens.prefix is not None else f"Mock{joining.kind}"
        key = KeyFacts(self._config, self._info, self._seed, kind, room)
        description = key.describe(
            source, tokens, asked, short_sequence_probability=short, **joining.key
        )
        plan = MaskedPlan(
            room=room, short_seq_prob=short, seed=self._seed, asked=asked, min_sentences=least
        )

        def build() -> Arrays:
            return dict(zip(INDEX_NAMES, build_masked_index(pieces, bounds, plan), strict=True))

        arrays = self._store.get(
            description,
            source.split,
            content_mark(tokens.sequence_lengths, bounds),
            INDEX_NAMES,
            build,
            lambda found, trusted: check_arrays(
                found, (first, last), room, asked, PROBES if trusted else None
            ),
            tokens.prefix,
        )
        index = MaskedIndex(*(arrays[name] for name in INDEX_NAMES))
        return SentenceTexts(tokens, pieces, index, description)

    def shortfall(self, source: SplitSource, tokens: TokenSource) -> str | None:
        """Return what a split has, if one pass over it yields no sample."""
        bounds = self._documents(source, tokens)
        found = np.diff(Pieces(tokens.sequence_lengths, self._joining.room).first(bounds))
        least = self._joining.min_sentences
        if (found >= least).any():
            return None
        documents = f"{len(bounds) - 1} documents"
        if not found.any():
            return f"no tokens in {documents}"
        return f"fewer than {least} sentences in each of {documents}"

    def _documents(self, source: SplitSource, tokens: TokenSource) -> npt.NDArray[np.int64]:
        """Return the bounds of a split's documents, as numbers of rows."""
        start, end = rows_of(source.share, len(tokens.documents) - 1)
        return tokens.documents[start : end + 1]


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
