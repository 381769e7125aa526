"""From flags to data sets: one per split, each a corpus or a blend of corpora.

The result is a pure function of the flags, the sizes asked for, the seed and the tokenizer; it
knows no ranks. On a cluster every process calls `build_datasets` with the same arguments: those
that may build (`BuildPolicy.build`, one per place where the cache is visible) publish the index
files, the others wait for them. Calling it on any one machine beforehand prepares the cache: keys
do not depend on how many processes there are.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from megatron.core.datasets.blended import Dataset
from megatron.core.datasets.cache import BuildPolicy
from megatron.core.datasets.config import DataConfig
from megatron.core.datasets.corpus import CorpusBuilder
from megatron.core.datasets.sources import read_sources, samples_asked
from megatron.core.datasets.split import SPLITS, Split
from megatron.core.datasets.token_info import TokenInfo as TokenInfo
from megatron.core.utils import Say, UserError, silent

Sizes = tuple[int | None, int | None, int | None]
"""Samples asked of train, valid and test: None for one pass, 0 for no data set at all."""


@dataclass(frozen=True)
class Built:
    """The data sets of a run; a split that nothing was asked of has none."""

    train: Dataset | None
    valid: list[Dataset]
    """One, or one per corpus with --multiple-validation-sets."""
    test: Dataset | None
    valid_names: list[str]
    files: Mapping[str, str]
    """Index files by path without ending: ``hit`` or ``built``."""


def build_datasets(
    config: DataConfig,
    sizes: Sizes,
    info: TokenInfo,
    seed: int,
    policy: BuildPolicy | None = None,
    *,
    extra: int = 1,
    keep_partial: bool = False,
    say: Say = silent,
) -> Built:
    """Return the data sets of every split.

    Samples are those of an encoder-decoder with --decoder-seq-length, of an encoder alone with
    --masked-words.

    Args:
        config: the data flags.
        sizes: samples asked of train, valid and test. With --full-validation the second is
            replaced by one pass.
        info: the tokenizer's part.
        seed: seed of the data order.
        policy: whether this process builds missing index files; by default it does.
        extra: tokens read beyond a sample for its labels; 0 shifts within the sample.
        keep_partial: keep a last validation sample that is shorter than the others.
        say: told what takes long (index files that are built or waited for) and what is odd.

    Raises:
        UserError: data is missing, damaged, empty or of another tokenizer, or flags disagree.
    """
    if policy is None:
        policy = BuildPolicy(timeout=config.index_build_timeout)
    builder = CorpusBuilder(config, info, seed, policy, extra, keep_partial, say)
    sources = read_sources(config)
    asked: dict[Split, int | None] = dict(zip(SPLITS, sizes, strict=True))
    if config.full_validation and asked["valid"] != 0:
        asked["valid"] = None
    made: dict[Split, list[Dataset]] = {}
    names: list[str] = []
    for split in SPLITS:
        source = sources[split]
        made[split] = []
        if asked[split] == 0:
            continue
        if source is None:
            if asked[split] is not None:
                raise _no_source(config, split, asked[split])
            continue
        if split == "valid" and config.multiple_validation_sets and source.blend is not None:
            prefixes = source.blend.prefixes
            made[split] = [builder.corpus(source, p, asked[split]) for p in prefixes]
            names = _short_names(prefixes)
        else:
            made[split] = [builder.split(source, asked[split])]
            names = ["validation"] if split == "valid" else names
    return Built(
        train=next(iter(made["train"]), None),
        valid=made["valid"],
        test=next(iter(made["test"]), None),
        valid_names=names,
        files=dict(sorted(builder.store.files.items())),
    )


def check_samples(config: DataConfig, info: TokenInfo, say: Say = silent) -> None:
    """Refuse a tokenizer that samples cannot be made with, without looking at any data.

    Args:
        config: the data flags.
        info: the tokenizer's part.
        say: told what is odd.

    Raises:
        UserError: as `build_datasets`, of the tokenizer and of lengths.
    """
    CorpusBuilder(config, info, 0, BuildPolicy(build=False), say=say)


def _no_source(config: DataConfig, split: Split, asked: int | None) -> UserError:
    if config.split_applies:
        return UserError(
            f"--split {config.split!r} gives {split} nothing, but {samples_asked(asked)} asked of "
            "it; give it a share, or ask nothing of it (--eval-iters 0 for validation and test)"
        )
    return UserError(
        f"{samples_asked(asked)} asked of the {split} split, but {' and '.join(config.sources)} "
        f"name no {split} data; add --{split}-data-path, or ask nothing of it (--eval-iters 0 for "
        "validation and test)"
    )


def _short_names(prefixes: tuple[str, ...]) -> list[str]:
    """Return the last part of each prefix, or the whole where those would be equal."""
    short = [os.path.basename(prefix) for prefix in prefixes]
    return short if len(set(short)) == len(short) else list(prefixes)
