"""What a run will read of each corpus, known without reading a token.

`describe` looks at the ``.idx`` headers and lengths alone: samples drawn, tokens, epochs per corpus
and split. `positions` says, during a run, in which epoch of each corpus it is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.core.datasets.blended import BlendedDataset, Dataset
from megatron.core.datasets.builder import Sizes
from megatron.core.datasets.config import DataConfig
from megatron.core.datasets.indexed import idx_path, read_index
from megatron.core.datasets.source import MOCK_LONGEST, MOCK_ROWS
from megatron.core.datasets.sources import SplitSource, read_sources
from megatron.core.datasets.split import SPLITS, Split, rows_of
from megatron.core.utils import human_count


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
    lengths: dict[str, np.ndarray | None] = {}
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
    lengths: dict[str, np.ndarray | None],
) -> list[SourceRow]:
    prefixes = source.blend.prefixes if source.blend else ("mock data",)
    counts = [_count(prefix, source, lengths) for prefix in prefixes]
    drawn = _drawn(config, source, asked, [count and count[1] for count in counts])
    known = [samples for samples in drawn if samples is not None]
    total = sum(known) if len(known) == len(drawn) else 0
    rows = []
    for prefix, count, samples in zip(prefixes, counts, drawn, strict=True):
        sequences, tokens = count or (0, 0)
        epochs = None
        if count is not None and samples is not None:
            epochs = samples * config.seq_length / tokens if tokens else 0.0
        rows.append(
            SourceRow(
                split=source.split,
                source=prefix,
                absent=count is None,
                sequences=sequences,
                tokens_per_epoch=tokens,
                samples=samples,
                share=samples / total if samples is not None and total else None,
                epochs=epochs,
            )
        )
    return rows


def _drawn(
    config: DataConfig, source: SplitSource, asked: int | None, tokens: Sequence[int | None]
) -> list[int | None]:
    """Return the samples of each corpus, from its tokens (None for absent files)."""
    passes = [None if one is None else max(0, one - 1) // config.seq_length for one in tokens]
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


def _count(
    prefix: str, source: SplitSource, lengths: dict[str, np.ndarray | None]
) -> tuple[int, int] | None:
    """Return (sequences, tokens) of a split of a corpus; None without its index file."""
    if prefix not in lengths:
        if source.blend is None:
            random = np.random.default_rng(0)
            lengths[prefix] = random.integers(1, MOCK_LONGEST, MOCK_ROWS, dtype=np.int32)
        elif idx_path(prefix).is_file():
            lengths[prefix] = read_index(prefix).sequence_lengths
        else:
            lengths[prefix] = None
    found = lengths[prefix]
    if found is None:
        return None
    start, end = rows_of(source.share, len(found))
    return end - start, int(found[start:end].sum(dtype=np.int64))


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
