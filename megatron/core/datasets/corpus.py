"""One split from its corpora: a corpus alone, or a blend of them, with their index files."""

import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.datasets.blend_index import blend_all, blend_by_weight
from megatron.core.datasets.blended import BlendedDataset, Dataset
from megatron.core.datasets.cache import Arrays, BuildPolicy, IndexCache
from megatron.core.datasets.checks import check_arrays, content_mark
from megatron.core.datasets.config import DataConfig
from megatron.core.datasets.fim import FimDataset, fim_options
from megatron.core.datasets.gpt import GPTDataset
from megatron.core.datasets.samples import SampleIndex, build_sample_index, plan_samples
from megatron.core.datasets.source import FileSource, MockSource, TokenSource
from megatron.core.datasets.sources import SplitSource, normalize
from megatron.core.datasets.split import rows_of, split_matrix
from megatron.core.datasets.token_info import TokenInfo, check_tokenizer, sample_options
from megatron.core.utils import Say, UserError, silent

INDEX_NAMES = ("document_index", "sample_index", "shuffle_index")
BLEND_NAMES = ("dataset_index", "dataset_sample_index")


def member_sizes(shares: list[float], size: int, surplus: float) -> tuple[list[int], list[int]]:
    """Return (samples planned, samples built) of each member of a blend of ``size`` samples."""
    planned = [math.ceil(size * share) for share in shares]
    return planned, [math.ceil(count * (1 + surplus)) for count in planned]


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
        self.seed = seed
        self.policy = policy
        self.options = sample_options(config, info, extra)
        self.fim = fim_options(config.fim, info) if config.fim.fim_data else None
        self.keep_partial = keep_partial
        self.say = say
        self.files: dict[str, str] = {}
        self._open: dict[str, FileSource] = {}

    def split(self, source: SplitSource, asked: int | None) -> Dataset:
        """Return the data set of a split: one corpus, a blend, or mock data."""
        blend = source.blend
        if blend is None:
            return self._gpt(source, MockSource(self.info.vocab_size, self.info.eod or 0), asked)
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

    def corpus(self, source: SplitSource, prefix: str, asked: int | None) -> GPTDataset:
        """Return the data set of one corpus."""
        return self._gpt(source, self._source(prefix), asked)

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
        start, end = rows_of(source.share, len(corpus.sequence_lengths))
        tokens = int(corpus.sequence_lengths[start:end].sum(dtype=np.int64))
        if tokens >= self.config.seq_length + self.options.extra:
            return True
        self.say(
            f"WARNING: {prefix} gives no {source.split} sample ({tokens} tokens in {end - start} "
            "sequences) and is left out of the blend"
        )
        return False

    def _corpora(
        self, source: SplitSource, prefixes: tuple[str, ...], asked: list[int] | list[None]
    ) -> list[GPTDataset]:
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
                check_tokenizer(prefix, self.info.fingerprint, self.info.vocab_size)
            self._open[prefix] = source
        return self._open[prefix]

    def _gpt(self, source: SplitSource, tokens: TokenSource, asked: int | None) -> GPTDataset:
        lengths = tokens.sequence_lengths
        rows = rows_of(source.share, len(lengths))
        count = int(lengths[rows[0] : rows[1]].sum(dtype=np.int64))
        self._check_size(source, tokens, rows, count, asked)
        plan = plan_samples(
            count,
            self.config.seq_length,
            asked,
            extra=self.options.extra,
            keep_partial=self.keep_partial and source.split == "valid",
        )
        description = self._describe(source, tokens, asked)
        folder = self.config.data_cache_path
        if folder is None and isinstance(tokens, FileSource):
            folder = os.path.join(tokens.name, "cache", f"{description['class']}_indices")
        marks = content_mark(lengths, rows, plan)
        cache = IndexCache(folder, description, source.split, marks, self.say)

        def build() -> Arrays:
            index = build_sample_index(lengths, rows, plan, self.seed)
            return dict(zip(INDEX_NAMES, index, strict=True))

        arrays, state = cache.get(
            INDEX_NAMES,
            build,
            lambda found, trusted: check_arrays(found, lengths, rows, plan, trusted),
            self.policy,
        )
        self._note(cache, state)
        index = SampleIndex(*(arrays[name] for name in INDEX_NAMES))
        if self.fim is not None:
            return FimDataset(
                tokens, plan, index, self.options, description, fim=self.fim, seed=self.seed
            )
        return GPTDataset(tokens, plan, index, self.options, description)

    def _describe(
        self, source: SplitSource, tokens: TokenSource, asked: int | None
    ) -> dict[str, Any]:
        """Return the declared inputs of one split of one corpus: the cache key is made of them."""
        is_file = isinstance(tokens, FileSource)
        split = self.config.split if source.shared else None
        text_class = "GPTDataset" if self.fim is None else "GPTFIMDataset"
        return {
            "class": text_class if is_file else "MockGPTDataset",
            "dataset_path": tokens.name if is_file else None,
            "num_samples": asked,
            "index_split": source.split,
            "random_seed": self.seed,
            "sequence_length": self.config.seq_length,
            "split": split,
            "split_matrix": None if split is None else split_matrix(split),
            "tokenizer": dict(self.info.identifiers),
        }

    def _blended(
        self,
        source: SplitSource,
        members: list[GPTDataset],
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

        cache = IndexCache(
            self.config.data_cache_path, description, source.split, {"members": lengths}, self.say
        )
        arrays, state = cache.get(BLEND_NAMES, build, check, self.policy)
        self._note(cache, state)
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

    def _check_size(
        self,
        source: SplitSource,
        tokens: TokenSource,
        rows: tuple[int, int],
        count: int,
        asked: int | None,
    ) -> None:
        """Refuse a split without tokens and a corpus too short for one sample."""
        need = self.config.seq_length + self.options.extra
        total = len(tokens.sequence_lengths)
        what = f"the {source.split} split of {tokens.name}"
        if count == 0:
            how = f"--split {self.config.split} gives it " if source.shared else "it has "
            raise UserError(
                f"{what} is empty: {how}{rows[1] - rows[0]} of {total} sequences and no tokens, "
                f"but {samples_asked(asked)} asked of it; give the split a larger share, or ask "
                "nothing of it (--eval-iters 0 for validation and test)"
            )
        if count >= need:
            return
        whole = int(tokens.sequence_lengths.sum(dtype=np.int64))
        if whole < need or asked is None:
            have = f"{whole} tokens" if whole < need else f"{count} of {whole} tokens"
            ways = ["lower --seq-length", "add data"]
            if source.shared and whole >= need:
                ways.append(f"give it a larger share by --split ({self.config.split})")
            if source.split != "train":
                ways.append("do without it by --eval-iters 0")
            raise UserError(
                f"{what} is shorter than one sample: it has {have}, a sample takes {need} "
                f"(--seq-length {self.config.seq_length} and {self.options.extra} for the labels); "
                f"{', '.join(ways[:-1])} or {ways[-1]}"
            )
        self.say(
            f"WARNING: {what} has {count} tokens, a sample takes {need}: its documents repeat "
            "within samples"
        )

    def _note(self, cache: IndexCache, state: str) -> None:
        if cache.folder is not None:
            self.files[str(Path(cache.folder) / cache.stem)] = state


def samples_asked(asked: int | None) -> str:
    """Return how much is asked, with its verb."""
    return "one pass is" if asked is None else f"{asked} samples are"
