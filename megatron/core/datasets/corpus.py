"""One split from its corpora: a corpus alone, or a blend of them, with their index files."""

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from megatron.core.datasets.bert_corpus import BertMaker
from megatron.core.datasets.blend_index import blend_all, blend_by_weight
from megatron.core.datasets.blended import BlendedDataset, Dataset, Member
from megatron.core.datasets.cache import Arrays, BuildPolicy, IndexStore
from megatron.core.datasets.config import DataConfig
from megatron.core.datasets.gpt_corpus import GPTMaker
from megatron.core.datasets.source import FileSource, MockSource, TokenSource
from megatron.core.datasets.sources import SplitSource, normalize
from megatron.core.datasets.t5_corpus import T5Maker
from megatron.core.datasets.token_info import TokenInfo, check_tokenizer
from megatron.core.utils import Say, UserError, silent

BLEND_NAMES = ("dataset_index", "dataset_sample_index")


def member_sizes(shares: list[float], size: int, surplus: float) -> tuple[list[int], list[int]]:
    """Return (samples planned, samples built) of each member of a blend of ``size`` samples."""
    planned = [math.ceil(size * share) for share in shares]
    return planned, [math.ceil(count * (1 + surplus)) for count in planned]


class Maker(Protocol):
    """What makes data sets of one kind of sample."""

    def mock(self) -> MockSource:
        """Return made-up rows."""

    def make(self, source: SplitSource, tokens: TokenSource, asked: int | None) -> Member:
        """Return the data set of one split of one corpus."""

    def shortfall(self, source: SplitSource, tokens: TokenSource) -> str | None:
        """Return what a split has, if one pass over it yields no sample."""


class CorpusBuilder:
    """Builds data sets, opening each corpus once and noting what the cache had."""

    def __init__(
        self,
        config: DataConfig,
        info: TokenInfo,
        seed: int,
        policy: BuildPolicy,
        extra: int = 1,
        keep_partial: bool = False,
        say: Say = silent,
    ) -> None:
        self.config = config
        self.info = info
        self.store = IndexStore(config.data_cache_path, policy, say)
        self.maker: Maker
        if config.t5.decoder_seq_length is not None:
            self.maker = T5Maker(config, info, seed, self.store, keep_partial, say)
        elif config.bert.masked_words:
            self.maker = BertMaker(config, info, seed, self.store, say)
        else:
            self.maker = GPTMaker(config, info, seed, self.store, extra, keep_partial, say)
        self.say = say
        self._open: dict[str, FileSource] = {}

    def split(self, source: SplitSource, asked: int | None) -> Dataset:
        """Return the data set of a split: one corpus, a blend, or mock data."""
        blend = source.blend
        if blend is None:
            return self.maker.make(source, self.maker.mock(), asked)
        if len(blend.prefixes) == 1 and (blend.weights is None or not source.shared):
            return self.corpus(source, blend.prefixes[0], asked)
        shares = blend.shares
        if shares is None:
            return self._by_size(source, blend.prefixes, asked)
        if asked is None:
            raise UserError(
                f"the {source.split} blend has weights, but no number of samples is asked of it "
                "(--full-validation reads all there is): give its prefixes without weights, or "
                "use --multiple-validation-sets"
            )
        planned, built = member_sizes(shares, asked, self.config.mid_level_dataset_surplus)
        members = self._corpora(source, blend.prefixes, built)
        size = sum(planned)
        return self._blended(source, members, normalize(shares), size)

    def corpus(self, source: SplitSource, prefix: str, asked: int | None) -> Member:
        """Return the data set of one corpus."""
        return self.maker.make(source, self._source(prefix), asked)

    def _by_size(
        self, source: SplitSource, prefixes: tuple[str, ...], asked: int | None
    ) -> Dataset:
        """Return the blend that takes one pass over each corpus, in proportion to its samples."""
        usable = [p for p in prefixes if self._can_give(source, p)]
        if not usable:
            raise UserError(
                f"none of the {len(prefixes)} corpora has enough tokens for one {source.split} "
                f"sample of --seq-length {self.config.seq_length}"
            )
        members = self._corpora(source, tuple(usable), [None] * len(usable))
        lengths = [len(member) for member in members]
        if asked is None:
            return self._blended(source, members, lengths, None)
        return self._blended(source, members, normalize(lengths), min(asked, sum(lengths)))

    def _can_give(self, source: SplitSource, prefix: str) -> bool:
        """Whether one pass over the corpus' rows yields a sample."""
        corpus = self._source(prefix)
        lacks = self.maker.shortfall(source, corpus)
        if lacks is None:
            return True
        self.say(
            f"WARNING: {prefix} gives no {source.split} sample ({lacks}) and is left out of the "
            "blend"
        )
        return False

    def _corpora(
        self, source: SplitSource, prefixes: tuple[str, ...], asked: list[int] | list[None]
    ) -> list[Member]:
        for prefix in prefixes:
            self._source(prefix)  # opened here: threads then only read
        threads = self.config.num_dataset_builder_threads
        with ThreadPoolExecutor(max_workers=threads) as pool:
            jobs = [
                pool.submit(self.corpus, source, prefix, size)
                for prefix, size in zip(prefixes, asked, strict=True)
            ]
            return [job.result() for job in jobs]

    def _source(self, prefix: str) -> FileSource:
        if prefix not in self._open:
            source = FileSource(prefix, mmap=self.config.mmap_bin_files)
            if not self.config.ignore_tokenizer_mismatch:
                check_tokenizer(prefix, self.info)
            self._open[prefix] = source
        return self._open[prefix]

    def _blended(
        self,
        source: SplitSource,
        members: list[Member],
        weights: list[float] | list[int],
        size: int | None,
    ) -> BlendedDataset:
        description = {
            "class": "BlendedDataset",
            "datasets": [member.description for member in members],
            "split": source.split,
            "weights": weights,
            "size": size,
        }
        lengths = [len(member) for member in members]

        def build() -> Arrays:
            if size is None:
                index = blend_all(lengths)
            else:
                index = blend_by_weight([float(w) for w in weights], size)
            return dict(zip(BLEND_NAMES, index, strict=True))

        def check(found: Arrays, _: bool) -> str | None:
            expected = sum(lengths) if size is None else size
            got = [found[name].shape for name in BLEND_NAMES]
            return None if got == [(expected,)] * 2 else f"shapes {got} are not {expected} samples"

        arrays = self.store.get(
            description, source.split, {"members": lengths}, BLEND_NAMES, build, check
        )
        dataset = BlendedDataset(
            members, weights, (arrays["dataset_index"], arrays["dataset_sample_index"]), description
        )
        self._check_draws(source, dataset)
        return dataset

    def _check_draws(self, source: SplitSource, blend: BlendedDataset) -> None:
        """Refuse a blend that asks a member for more samples than it has."""
        for member, drawn in zip(blend.members, blend.consumed(len(blend)), strict=True):
            if drawn > len(member):
                surplus = self.config.mid_level_dataset_surplus
                raise UserError(
                    f"the {source.split} blend draws {drawn} samples from {member.source.name}, "
                    f"which has {len(member)}; raise --mid-level-dataset-surplus ({surplus})"
                )
