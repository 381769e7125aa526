"""Samples and epochs of each training corpus, from index files alone."""

from dataclasses import dataclass

import numpy as np

from megatron.core.datasets.config import DataConfig
from megatron.core.datasets.corpus import member_sizes
from megatron.core.datasets.indexed import read_index
from megatron.core.datasets.sources import normalize, read_sources
from megatron.core.datasets.split import rows_of
from megatron.core.utils import UserError


@dataclass(frozen=True)
class PlannedSource:
    """What a run takes from one corpus."""

    prefix: str
    documents: int
    """Of the training share."""
    tokens: int
    samples: int
    epochs: float


def training_sources(config: DataConfig, samples: int) -> list[PlannedSource]:
    """Return what a run of ``samples`` samples takes from each training corpus.

    Raises:
        UserError: an index file is missing or damaged, or the split leaves nothing for training.
    """
    source = read_sources(config)["train"]
    if source is None:
        raise UserError("there is no training data: --split gives it no share")
    assert source.blend is not None, "mock data has no files"
    counted = []
    for prefix in source.blend.prefixes:
        lengths = read_index(prefix).sequence_lengths
        start, end = rows_of(source.share, len(lengths))
        counted.append((prefix, end - start, int(lengths[start:end].sum(dtype=np.int64))))
    # Without weights corpora are mixed in proportion to their samples.
    shares = source.blend.shares or normalize(
        [max(tokens / config.seq_length, 1e-9) for _, _, tokens in counted]
    )
    planned, _ = member_sizes(shares, samples, config.mid_level_dataset_surplus)
    return [
        PlannedSource(prefix, rows, tokens, taken, taken * config.seq_length / max(tokens, 1))
        for (prefix, rows, tokens), taken in zip(counted, planned, strict=True)
    ]
