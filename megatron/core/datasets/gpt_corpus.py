"""GPT's samples of one corpus, from flags."""

from megatron.core.datasets.cache import IndexStore
from megatron.core.datasets.config import DataConfig
from megatron.core.datasets.fim import FimDataset, fim_options
from megatron.core.datasets.gpt import GPTDataset
from megatron.core.datasets.source import MockSource, TokenSource
from megatron.core.datasets.sources import SplitSource
from megatron.core.datasets.stream_corpus import Cut, StreamBuilder
from megatron.core.datasets.token_info import TokenInfo, sample_options
from megatron.core.utils import Say


class GPTMaker:
    """Makes data sets of next-token prediction, with or without permuted documents."""

    def __init__(
        self,
        config: DataConfig,
        info: TokenInfo,
        seed: int,
        store: IndexStore,
        extra: int,
        keep_partial: bool,
        say: Say,
    ) -> None:
        self._info = info
        self._seed = seed
        self._options = sample_options(config, info, extra)
        self._fim = fim_options(config.fim, info) if config.fim.fim_data else None
        cut = Cut(
            tokens=config.seq_length,
            extra=extra,
            why=f"--seq-length {config.seq_length} and {extra} for the labels",
            kind="GPTDataset" if self._fim is None else "GPTFIMDataset",
            mock_kind="GPTDataset",
            keep_partial=keep_partial,
        )
        self._stream = StreamBuilder(config, info, seed, cut, store, say)

    def mock(self) -> MockSource:
        """Return Megatron-core's made-up rows."""
        return MockSource(self._info.vocab_size, self._info.eod or 0)

    def make(self, source: SplitSource, tokens: TokenSource, asked: int | None) -> GPTDataset:
        """Return the data set of one split of one corpus."""
        stream = self._stream.build(source, tokens, asked)
        parts = (tokens, stream.plan, stream.index, self._options, stream.description)
        if self._fim is None:
            return GPTDataset(*parts)
        return FimDataset(*parts, fim=self._fim, seed=self._seed)

    def shortfall(self, source: SplitSource, tokens: TokenSource) -> str | None:
        """Return what a split has, if one pass over it yields no sample."""
        return self._stream.shortfall(source, tokens)
