"""What a run will read of each corpus, known without reading a token.

`describe` looks at the ``.idx`` headers and lengths alone: samples drawn, tokens, epochs per corpus
and split. `positions` says, during a run, in which epoch of each corpus it is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.bert_corpus import text_room
from megatron.core.datasets.blended import BlendedDataset, Dataset
from megatron.core.datasets.builder import Sizes
from megatron.core.datasets.config import DataConfig
from megatron.core.datasets.indexed import idx_path, read_index
from megatron.core.datasets.noise_shape import noise_shape
from megatron.core.datasets.source import FEW_MOCK_ROWS, MOCK_LONGEST, MOCK_ROWS
from megatron.core.datasets.sources import SplitSource, empty_split, read_sources
from megatron.core.datasets.split import SPLITS, Split, rows_of
from megatron.core.datasets.t5_corpus import FREE_PLACES
from megatron.core.utils import human_count


@dataclass(frozen=True)
class _Rows:
    """What a split takes a share of: documents where spans are masked, else sequences."""

    lengths: npt.NDArray[Any]
    are_parted: bool = False
    """Documents are of several sequences: sentences."""


Lengths = dict[str, _Rows | None]
"""By prefix; None for a corpus without its index file."""


@dataclass(frozen=True, kw_only=True)
class SourceRow:
    """One corpus in one split; None is what cannot be told because index files are absent."""

    split: Split
    source: str
    absent: bool
    """Its index file does not exist."""
    sequences: int
    tokens_per_epoch: int
    samples: int | None
    """Drawn from this corpus over the run."""
    share: float | None
    """Of the split's samples."""
    epochs: float | None
    """Passes over its tokens that these samples make; 0 for an empty corpus."""
    refusal: str | None = None
    """Why no run can draw from it."""

    def line(self) -> str:
        """Return the row as one line of text."""
        share = "" if self.share is None else f"{self.share:.2%}"
        samples = "?" if self.samples is None else f"{self.samples:,}"
        tokens = "absent" if self.absent else human_count(self.tokens_per_epoch)
        epochs = "?" if self.epochs is None else f"{self.epochs:.3f}"
        return (
            f"{self.split:<5} {share:>7}  {samples:>12} samples  {tokens:>8} tokens/epoch  "
            f"{epochs:>8} epochs  {self.source}"
        )


def describe(config: DataConfig, sizes: Sizes) -> list[SourceRow]:
    """Return what each split draws from each corpus; index files may be absent.

    Args:
        config: the data flags.
        sizes: samples asked of train, valid and test; None for one pass, 0 for nothing.

    Raises:
        UserError: flags disagree or an index file is damaged.
    """
    sources = read_sources(config)
    lengths: Lengths = {}
    rows = []
    for split, asked in zip(SPLITS, sizes, strict=True):
        source = sources[split]
        if source is None or asked == 0:
            continue
        if split == "valid" and config.full_validation:
            asked = None
        rows += _describe_split(config, source, asked, lengths)
    return rows


def _describe_split(
    config: DataConfig,
    source: SplitSource,
    asked: int | None,
    lengths: Lengths,
) -> list[SourceRow]:
    prefixes = source.blend.prefixes if source.blend else ("mock data",)
    counts = [_count(config, prefix, source, lengths) for prefix in prefixes]
    drawn = _drawn(config, source, asked, counts)
    known = [samples for samples in drawn if samples is not None]
    total = sum(known) if len(known) == len(drawn) else 0
    # A corpus that is mixed in by its size, of which there is none, is left out.
    alone = source.split == "valid" and config.multiple_validation_sets
    by_size = source.blend is not None and source.blend.weights is None and len(prefixes) > 1
    is_left_out = by_size and not alone and any(count and count.tokens for count in counts)
    rows = []
    for prefix, count, samples in zip(prefixes, counts, drawn, strict=True):
        epochs = None
        if count is not None and samples is not None:
            epochs = samples / count.samples if count.samples else 0.0
        refusal = None
        if count is not None and not count.tokens and not is_left_out:
            refusal = str(empty_split(source, prefix, config, count.taken, asked))
        rows.append(
            SourceRow(
                split=source.split,
                source=prefix,
                absent=count is None,
                sequences=count.sequences if count else 0,
                tokens_per_epoch=count.tokens if count else 0,
                samples=samples,
                share=samples / total if samples is not None and total else None,
                epochs=epochs,
                refusal=refusal,
            )
        )
    return rows


def _drawn(
    config: DataConfig, source: SplitSource, asked: int | None, counts: Sequence["_Pass | None"]
) -> list[int | None]:
    """Return the samples of each corpus, from what it has (None for absent files)."""
    passes = [None if one is None else one.whole_samples for one in counts]
    alone = source.split == "valid" and config.multiple_validation_sets
    shares = source.blend.shares if source.blend else None
    if alone or len(passes) == 1:
        return [one if asked is None else asked for one in passes]
    if shares is not None and asked is not None:
        return [math.ceil(asked * share) for share in shares]
    # One pass over each corpus, or part of it, in proportion to their samples.
    sizes = [one for one in passes if one is not None]
    if len(sizes) < len(passes):
        return [None] * len(passes)
    whole = sum(sizes)
    part = 1.0 if asked is None or not whole else min(1.0, asked / whole)
    return [round(one * part) for one in sizes]


@dataclass(frozen=True)
class _Pass:
    """What one pass over a split of a corpus is."""

    sequences: int
    tokens: int
    samples: float
    whole_samples: int
    taken: str
    """Of how many rows, in words."""


def _count(config: DataConfig, prefix: str, source: SplitSource, lengths: Lengths) -> _Pass | None:
    """Return one pass over a split of a corpus; None without its index file."""
    is_alone = config.bert.masked_words
    is_masked = is_alone or config.t5.decoder_seq_length is not None
    if prefix not in lengths:
        lengths[prefix] = _rows(prefix, source, is_masked)
    found = lengths[prefix]
    if found is None:
        return None
    start, end = rows_of(source.share, len(found.lengths))
    mine = found.lengths[start:end].astype(np.int64)
    tokens = int(mine.sum(dtype=np.int64))
    unit = "documents" if is_masked else "sequences"
    taken = f"{end - start} of {len(found.lengths)} {unit}"
    if not is_masked:
        whole = max(0, tokens - 1) // config.seq_length
        return _Pass(end - start, tokens, tokens / config.seq_length, whole, taken)
    if not is_alone and config.t5.span_corruption == "random_spans":
        text = noise_shape(config).longest_text(config.seq_length)
        whole = tokens // max(1, text)
        return _Pass(end - start, tokens, tokens / max(1, text), whole, taken)
    # About: where samples end follows from sentences and draws. The end of a document goes with
    # the sample before if it is a sentence, and is a sample where a long sequence is cut.
    room = text_room(config) if is_alone else config.seq_length - FREE_PLACES
    full = mine // room if found.are_parted else -(-mine // room)
    if is_alone and config.bert.bert_binary_head and not found.are_parted:
        full //= 2  # a sample has two parts, and a long sequence is cut to parts of its length
        mine = np.where(full > 0, mine, 0)
    samples = int(np.maximum(full, mine > 0).sum())
    return _Pass(end - start, tokens, samples, samples, taken)


def _rows(prefix: str, source: SplitSource, is_masked: bool) -> _Rows | None:
    """Return the rows of a corpus; None without its index file."""
    if source.blend is None:
        count = FEW_MOCK_ROWS if is_masked else MOCK_ROWS
        return _Rows(np.random.default_rng(0).integers(1, MOCK_LONGEST, count, dtype=np.int32))
    if not idx_path(prefix).is_file():
        return None
    index = read_index(prefix)
    if not is_masked:
        return _Rows(index.sequence_lengths)
    ends = np.zeros(len(index.sequence_lengths) + 1, dtype=np.int64)
    np.cumsum(index.sequence_lengths, out=ends[1:])
    documents = np.diff(ends[index.document_indices])
    return _Rows(documents, len(documents) < len(index.sequence_lengths))


@dataclass(frozen=True)
class Position:
    """Where a run stands in one corpus."""

    source: str
    samples: int
    epoch: float
    """Passes made: 1.25 is a quarter into the second."""


def positions(dataset: Dataset, consumed_samples: int) -> list[Position]:
    """Return where the first ``consumed_samples`` of a data set have got to in each corpus.

    For a blend, from its shares: within a few samples of the truth (`BlendedDataset.consumed`
    counts exactly, in time that grows with the run).
    """
    if isinstance(dataset, BlendedDataset):
        whole = sum(dataset.weights)
        taken = [round(consumed_samples * weight / whole) for weight in dataset.weights]
        members = tuple(dataset.members)
    else:
        taken, members = [consumed_samples], (dataset,)
    return [
        Position(member.source.name, samples, samples / member.samples_per_epoch)
        for member, samples in zip(members, taken, strict=True)
    ]
