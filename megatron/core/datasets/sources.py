"""Which corpora feed which split, read from the flags and the files that they name."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.config import flag_of
from megatron.core.datasets.config import PER_SPLIT, DataConfig
from megatron.core.datasets.indexed import idx_path
from megatron.core.datasets.split import SPLITS, Share, Split, split_matrix
from megatron.core.utils import UserError


@dataclass(frozen=True)
class Blend:
    """Corpora by prefix, with their weights as given, or None to mix by size."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None

    @property
    def shares(self) -> list[float] | None:
        """Weights that sum to one."""
        if self.weights is None:
            return None
        return normalize(self.weights)


@dataclass(frozen=True)
class SplitSource:
    """What one split is made from: a blend, and the share of each corpus' rows that it takes."""

    split: Split
    blend: Blend | None
    """None for mock data."""
    share: Share
    shared: bool
    """The corpora are cut by --split rather than named for this split."""


def samples_asked(asked: int | None) -> str:
    """Return how much is asked, with its verb."""
    return "one pass is" if asked is None else f"{asked} samples are"


def empty_split(
    source: SplitSource, name: str, config: DataConfig, rows: str, asked: int | None
) -> UserError:
    """Return what refuses a split of a corpus that has no tokens.

    Args:
        source: the split.
        name: of the corpus.
        config: the data flags.
        rows: what the split takes of the corpus, as in ``0 of 20 documents``.
        asked: samples asked of it; None for one pass.
    """
    how = f"--split {config.split} gives it " if source.shared else "it has "
    return UserError(
        f"the {source.split} split of {name} is empty: {how}{rows} and no tokens, but "
        f"{samples_asked(asked)} asked of it; give the split a larger share, or ask nothing of it "
        "(--eval-iters 0 for validation and test)"
    )


def read_sources(config: DataConfig) -> dict[Split, SplitSource | None]:
    """Return the source of every split; None for a split without data.

    Raises:
        UserError: no data is named, or a list or file cannot be read.
    """
    if not config.sources:
        raise UserError(
            "no training data: give --data-path PREFIX (or --train-data-path and its like, or "
            "--mock-data for synthetic tokens)"
        )
    if config.split_applies:
        blend = _common_blend(config)
        assert config.split is not None
        shares = split_matrix(config.split)
        return {
            split: None if share is None else SplitSource(split, blend, share, True)
            for split, share in zip(SPLITS, shares, strict=True)
        }
    return {
        split: None if blend is None else SplitSource(split, blend, (0.0, 1.0), False)
        for split, blend in _blends_per_split(config).items()
    }


def _common_blend(config: DataConfig) -> Blend | None:
    if config.mock_data:
        return None
    if config.data_args_path:
        return parse_blend(
            _read(config.data_args_path, "--data-args-path").split(),
            (f"--data-args-path {config.data_args_path}"),
        )
    assert config.data_path
    return parse_blend(config.data_path, "--data-path")


def _blends_per_split(config: DataConfig) -> dict[Split, Blend | None]:
    path = config.per_split_data_args_path
    if path is None:
        lists: list[Any] = [getattr(config, name) for name in PER_SPLIT]
        names = [flag_of(DataConfig, name) for name in PER_SPLIT]
    else:
        try:
            content = json.loads(_read(path, "--per-split-data-args-path"))
        except ValueError as error:
            raise UserError(
                f"--per-split-data-args-path {path} is not valid JSON: {error}"
            ) from None
        if not isinstance(content, dict) or not set(content) <= set(SPLITS):
            raise UserError(
                f"--per-split-data-args-path {path} must hold an object with keys "
                f"{', '.join(SPLITS)}, each a list of prefixes with or without weights"
            )
        lists = [content.get(split) for split in SPLITS]
        names = [f"--per-split-data-args-path {path}, {split}" for split in SPLITS]
    blends: dict[Split, Blend | None] = {}
    for split, items, name in zip(SPLITS, lists, names, strict=True):
        words = items.split() if isinstance(items, str) else [str(i) for i in items or []]
        blends[split] = parse_blend(words, name) if words else None
    return blends


def normalize(weights: Sequence[float]) -> list[float]:
    """Return the weights over their sum, rounded as Megatron-core rounds: it is part of the key."""
    numbers = np.array(weights, dtype=np.float64)
    return (numbers / np.sum(numbers)).tolist()  # type: ignore[no-any-return]


def parse_blend(words: Sequence[str], flag: str) -> Blend:
    """Return the blend that a list of prefixes, or of weights and prefixes in turn, describes.

    Raises:
        UserError: weights and prefixes do not alternate, or a weight is not positive.
    """
    if not words:
        raise UserError(f"{flag} is empty; give PREFIX, or WEIGHT PREFIX pairs")
    numbers = [_weight(word) for word in words]
    if all(number is None for number in numbers):
        return Blend(tuple(words))
    pairs = len(words) % 2 == 0
    if not pairs or any(
        (number is None) == (position % 2 == 0) for position, number in enumerate(numbers)
    ):
        raise UserError(
            f"{flag} {' '.join(words[:8])}{' ...' if len(words) > 8 else ''}: weights and prefixes "
            "must alternate (WEIGHT PREFIX WEIGHT PREFIX ...), or there must be no weights at all"
        )
    weights = [number for number in numbers[::2] if number is not None]
    for weight, prefix in zip(weights, words[1::2], strict=True):
        if not (math.isfinite(weight) and weight > 0):
            raise UserError(f"{flag}: the weight of {prefix} is {weight}; it must be above 0")
    return Blend(tuple(words[1::2]), tuple(weights))


def _weight(word: str) -> float | None:
    """Return the number a word stands for; a file of that name makes it a prefix."""
    try:
        number = float(word)
    except ValueError:
        return None
    return None if idx_path(word).is_file() else number


def _read(path: str, flag: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{flag} {path} cannot be read: {error}") from None
