"""What a run will read of each corpus, known without reading a token.

`describe` looks at the ``.idx`` headers and lengths alone: samples drawn, tokens, epochs per corpus
and split. `positions` says, during a run, in which epoch of each corpus it is.
"""

import math
from dataclasses import dataclass

import numpy as np

from megatron.core.datasets.blended import BlendedDataset, Dataset
from megatron.core.datasets.builder import Sizes
from megatron.core.datasets.config import DataConfig
from megatron.core.datasets.indexed import read_index
from megatron.core.datasets.source import MOCK_LONGEST, MOCK_ROWS
from megatron.core.datasets.sources import SplitSource, read_sources
from megatron.core.datasets.split import SPLITS, Split, rows_of
from megatron.core.utils import human_count


@dataclass(frozen=True, kw_only=True)
class SourceRow:
    """One corpus in one split."""

    split: Split
    source: str
    share: float
    """Of the split's samples."""
    sequences: int
    tokens_per_epoch: int
    samples: int
    """Drawn from this corpus over the run."""
    epochs: float
    """Passes over its tokens that these samples make; 0 for an empty corpus."""

    def line(self) -> str:
        """Return the row as one line of text."""
        return (
            f"{self.split:<5} {self.share:7.2%}  {self.samples:>12,} samples  "
            f"{human_count(self.tokens_per_epoch):>8} tokens/epoch  {self.epochs:8.3f} epochs  "
            f"{self.source}"
        )


def describe(config: DataConfig, sizes: Sizes) -> list[SourceRow]:
    """Return what each split draws from each corpus.

    Args:
        config: the data flags.
        sizes: samples asked of train, valid and test; None for one pass, 0 for nothing.

    Raises:
        UserError: flags disagree or an index file is missing or damaged.
    """
    sources = read_sources(config)
    lengths: dict[str, np.ndarray] = {}
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
    config: DataConfig, source: SplitSource, asked: int | None, lengths: dict[str, np.ndarray]
) -> list[SourceRow]:
    prefixes = source.blend.prefixes if source.blend else ("mock data",)
    counts = [_count(prefix, source, lengths) for prefix in prefixes]
    passes = [max(0, tokens - 1) // config.seq_length for _, tokens in counts]
    alone = source.split == "valid" and config.multiple_validation_sets
    shares = source.blend.shares if source.blend else None
    if alone:
        drawn = [one if asked is None else asked for one in passes]
    elif shares is not None and asked is not None:
        drawn = [math.ceil(asked * share) for share in shares]
    elif len(prefixes) == 1:
        drawn = [passes[0] if asked is None else asked]
    else:
        whole = sum(passes)
        part = 1.0 if asked is None or not whole else min(1.0, asked / whole)
        drawn = [round(one * part) for one in passes]
    total = sum(drawn)
    return [
        SourceRow(
            split=source.split,
            source=prefix,
            share=samples / total if total else 0.0,
            sequences=sequences,
            tokens_per_epoch=tokens,
            samples=samples,
            epochs=samples * config.seq_length / tokens if tokens else 0.0,
        )
        for prefix, (sequences, tokens), samples in zip(prefixes, counts, drawn, strict=True)
    ]


def _count(prefix: str, source: SplitSource, lengths: dict[str, np.ndarray]) -> tuple[int, int]:
    """Return (sequences, tokens) of a split of a corpus."""
    if prefix not in lengths:
        if source.blend is None:
            random = np.random.default_rng(0)
            lengths[prefix] = random.integers(1, MOCK_LONGEST, MOCK_ROWS, dtype=np.int32)
        else:
            lengths[prefix] = read_index(prefix).sequence_lengths
    start, end = rows_of(source.share, len(lengths[prefix]))
    return end - start, int(lengths[prefix][start:end].sum(dtype=np.int64))


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
        members = dataset.members
    else:
        taken, members = [consumed_samples], [dataset]
    return [
        Position(member.source.name, samples, samples / member.plan.samples_per_epoch)
        for member, samples in zip(members, taken, strict=True)
    ]
