"""The rows of one corpus as a stream that is cut every so many tokens: its index, from flags."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.core.datasets.cache import Arrays, IndexStore
from megatron.core.datasets.checks import check_arrays, content_mark
from megatron.core.datasets.config import DataConfig
from megatron.core.datasets.key_facts import KeyFacts
from megatron.core.datasets.samples import (
    SampleIndex,
    SamplePlan,
    build_sample_index,
    plan_samples,
)
from megatron.core.datasets.source import TokenSource
from megatron.core.datasets.sources import SplitSource, empty_split
from megatron.core.datasets.split import rows_of
from megatron.core.datasets.token_info import TokenInfo
from megatron.core.utils import Say, UserError

INDEX_NAMES = ("document_index", "sample_index", "shuffle_index")


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How long samples are."""

    tokens: int
    extra: int
    """Tokens read beyond a sample, which the next one reads again."""
    why: str
    """What a user set that makes a sample take so many tokens."""
    kind: str
    """Class of the samples, in the cache's names."""
    mock_kind: str
    """The same for made-up rows, after ``Mock``."""
    keep_partial: bool = False
    """End validation with a sample that is shorter."""

    @property
    def need(self) -> int:
        """Tokens that one sample takes."""
        return self.tokens + self.extra


@dataclass(frozen=True)
class Stream:
    """What a split of a corpus is read by."""

    plan: SamplePlan
    index: SampleIndex
    description: dict[str, Any]
    """What it is made from, in Megatron-core's form; part of a blend's cache key."""


class StreamBuilder:
    """Builds the index of one split of one corpus."""

    def __init__(
        self, config: DataConfig, info: TokenInfo, seed: int, cut: Cut, store: IndexStore, say: Say
    ) -> None:
        self._config = config
        self._info = info
        self._seed = seed
        self._cut = cut
        self._store = store
        self._say = say

    def build(self, source: SplitSource, tokens: TokenSource, asked: int | None) -> Stream:
        """Return the index of a split of a corpus.

        Args:
            source: the split.
            tokens: the corpus' rows.
            asked: samples asked of the split; None for one pass.

        Raises:
            UserError: it has no tokens, or too few.
        """
        lengths = tokens.sequence_lengths
        rows, count = self._size(source, tokens)
        self._check_size(source, tokens, rows, count, asked)
        cut = self._cut
        plan = plan_samples(
            count,
            cut.tokens,
            asked,
            extra=cut.extra,
            keep_partial=cut.keep_partial and source.split == "valid",
        )
        kind = cut.kind if tokens.prefix is not None else f"Mock{cut.mock_kind}"
        key = KeyFacts(self._config, self._info, self._seed, kind, cut.tokens)
        description = key.describe(source, tokens, asked)

        def build() -> Arrays:
            index = build_sample_index(lengths, rows, plan, self._seed)
            return dict(zip(INDEX_NAMES, index, strict=True))

        arrays = self._store.get(
            description,
            source.split,
            content_mark(lengths, rows, plan),
            INDEX_NAMES,
            build,
            lambda found, trusted: check_arrays(found, lengths, rows, plan, trusted),
            tokens.prefix,
        )
        return Stream(plan, SampleIndex(*(arrays[name] for name in INDEX_NAMES)), description)

    def shortfall(self, source: SplitSource, tokens: TokenSource) -> str | None:
        """Return what a split has, if one pass over it yields no sample."""
        rows, count = self._size(source, tokens)
        if count >= self._cut.need:
            return None
        return f"{count} tokens in {rows[1] - rows[0]} {tokens.row_name}s"

    def _size(self, source: SplitSource, tokens: TokenSource) -> tuple[tuple[int, int], int]:
        """Return (rows, tokens) of a split."""
        lengths = tokens.sequence_lengths
        start, end = rows_of(source.share, len(lengths))
        return (start, end), int(lengths[start:end].sum(dtype=np.int64))

    def _check_size(
        self,
        source: SplitSource,
        tokens: TokenSource,
        rows: tuple[int, int],
        count: int,
        asked: int | None,
    ) -> None:
        """Refuse a split without tokens and a corpus too short for one sample."""
        need, split = self._cut.need, self._config.split
        total = len(tokens.sequence_lengths)
        what = f"the {source.split} split of {tokens.name}"
        if count == 0:
            taken = f"{rows[1] - rows[0]} of {total} {tokens.row_name}s"
            raise empty_split(source, tokens.name, self._config, taken, asked)
        if count >= need:
            return
        whole = int(tokens.sequence_lengths.sum(dtype=np.int64))
        if whole < need or asked is None:
            have = f"{whole} tokens" if whole < need else f"{count} of {whole} tokens"
            ways = ["lower --seq-length", "add data"]
            if source.shared and whole >= need:
                ways.append(f"give it a larger share by --split ({split})")
            if source.split != "train":
                ways.append("do without it by --eval-iters 0")
            raise UserError(
                f"{what} is shorter than one sample: it has {have}, a sample takes {need} "
                f"({self._cut.why}); {', '.join(ways[:-1])} or {ways[-1]}"
            )
        self._say(
            f"WARNING: {what} has {count} tokens, a sample takes {need}: its documents repeat "
            "within samples"
        )
