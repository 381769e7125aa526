"""What a split of a corpus is made from, declared: the key of its index files is a hash of it."""

from dataclasses import dataclass
from typing import Any

from megatron.core.datasets.config import DataConfig
from megatron.core.datasets.source import TokenSource
from megatron.core.datasets.sources import SplitSource
from megatron.core.datasets.split import split_matrix
from megatron.core.datasets.token_info import TokenInfo


@dataclass(frozen=True)
class KeyFacts:
    """What all corpora of a run have alike."""

    config: DataConfig
    info: TokenInfo
    seed: int
    kind: str
    """Class of the samples, Megatron-core's where they are its."""
    sequence_length: int

    def describe(
        self, source: SplitSource, tokens: TokenSource, asked: int | None, **more: Any
    ) -> dict[str, Any]:
        """Return the declared inputs of one split of one corpus, in Megatron-core's order.

        Args:
            source: the split.
            tokens: the corpus.
            asked: samples asked of it; None for one pass.
            more: what the kind of samples depends on besides.
        """
        split = self.config.split if source.shared else None
        return {
            "class": self.kind,
            "dataset_path": tokens.prefix,
            "num_samples": asked,
            "index_split": source.split,
            "random_seed": self.seed,
            "sequence_length": self.sequence_length,
            "split": split,
            "split_matrix": None if split is None else split_matrix(split),
            "tokenizer": dict(self.info.identifiers),
            **more,
        }
