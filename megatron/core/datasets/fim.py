"""Fill-in-the-middle (Bavarian et al., 2022): documents permuted so that a model learns to infill.

A document's text is cut at two characters drawn at random, and its parts become

    PSM    <prefix> prefix <suffix> suffix <middle> middle
    SPM    <prefix> <suffix> suffix <middle> prefix middle

each encoded by itself, as a user's would be. Whether a document is permuted, where it is cut and in
which form follow from the seed and the number of the sample alone, so that a resumed run, another
number of reading processes, and a second look at a sample all give the same.

Documents end at end-of-document tokens, which stay where they are, as do other special tokens of
the tokenizer. A sample may begin or end inside a document; what it holds of it counts as a
document, but is left as it is where it begins or ends inside a character. What no longer fits the
sample is cut off at its end.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.core.config import flag_of
from megatron.core.datasets.config import FimConfig
from megatron.core.datasets.gpt import GPTDataset, Sample, make_sample
from megatron.core.datasets.token_info import TokenInfo
from megatron.core.utils import UserError

Tokens = npt.NDArray[np.int64]
TORN = "\N{REPLACEMENT CHARACTER}"
"""What decoding puts for bytes that are no character."""


@dataclass(frozen=True, kw_only=True)
class FimOptions:
    """How documents are permuted."""

    rate: float
    spm_rate: float
    prefix: int
    middle: int
    suffix: int
    pad: int
    breaks: tuple[int, ...]
    """Tokens between which text is permuted: end of document, and the tokenizer's special ones."""
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Any], str]
    split: int | None = None
    """Token between the fragments of a document."""
    fragment_rate: float = 0.0
    no_prefix: str | None = None


class FimDataset(GPTDataset):
    """A `GPTDataset` some of whose documents are permuted."""

    def __init__(self, *args: Any, fim: FimOptions, seed: int) -> None:
        super().__init__(*args)
        self.fim = fim
        self.seed = seed

    def sample(self, i: int, text: Tokens) -> Sample:
        return make_sample(self.permuted(i, text), self.options, fill=self.fim.pad)

    def permuted(self, i: int, text: Tokens) -> Tokens:
        """Return what becomes of the tokens of sample ``i``: at most as many."""
        return permute(text, self.fim, generator(self.seed, i))[: len(text)]


def generator(seed: int, sample: int) -> np.random.RandomState:
    """Return the source of a sample's draws."""
    words = [number >> shift & 0xFFFFFFFF for number in (seed, sample) for shift in (0, 32)]
    return np.random.RandomState(words)


def permute(text: Tokens, options: FimOptions, random: np.random.RandomState) -> Tokens:
    """Return the tokens of a sample with some documents permuted, each of which grows by three."""

    def document(tokens: Tokens) -> Tokens:
        if options.split is None or not (tokens == options.split).any():
            return _permute_text(tokens, options.rate, options, random)
        if random.random_sample() >= options.rate:
            return tokens
        return _between(
            tokens,
            (options.split,),
            lambda part: _permute_text(part, options.fragment_rate, options, random),
        )

    return _between(text, options.breaks, document)


def _between(tokens: Tokens, breaks: tuple[int, ...], change: Callable[[Tokens], Tokens]) -> Tokens:
    """Return ``tokens`` with each stretch between ``breaks`` changed; breaks stay."""
    parts: list[Tokens] = []
    start = 0
    for place in np.flatnonzero(np.isin(tokens, breaks)).tolist():
        parts += [change(tokens[start:place]), tokens[place : place + 1]]
        start = place + 1
    return np.concatenate([*parts, change(tokens[start:])])


def _permute_text(
    tokens: Tokens, rate: float, options: FimOptions, random: np.random.RandomState
) -> Tokens:
    if not len(tokens) or random.random_sample() >= rate:
        return tokens
    text = options.decode(tokens.tolist())
    if TORN in text or (options.no_prefix is not None and text.startswith(options.no_prefix)):
        return tokens
    first, second = sorted(random.randint(0, len(text) + 1, size=2).tolist())
    prefix, middle, suffix = (
        np.asarray(options.encode(part), dtype=np.int64)
        for part in (text[:first], text[first:second], text[second:])
    )
    marks = np.array([[options.prefix], [options.suffix], [options.middle]], dtype=np.int64)
    if random.random_sample() < options.spm_rate:
        return np.concatenate([marks[0], marks[1], suffix, marks[2], prefix, middle])
    return np.concatenate([marks[0], prefix, marks[1], suffix, marks[2], middle])


def fim_options(config: FimConfig, info: TokenInfo) -> FimOptions:
    """Return how documents are permuted under these flags.

    Raises:
        UserError: the vocabulary lacks one of the tokens.
    """
    tokenizer = info.tokenizer
    assert tokenizer is not None, "fill-in-the-middle works on text"
    names = ("fim_prefix_token", "fim_middle_token", "fim_suffix_token", "fim_pad_token")
    prefix, middle, suffix, pad = (_token(config, name, tokenizer) for name in names)
    end = _token(config, "fim_eod_token", tokenizer)
    split = None
    if config.fim_split_sample is not None:
        split = _token(config, "fim_split_sample", tokenizer)
    return FimOptions(
        rate=config.fim_rate,
        spm_rate=config.fim_spm_rate,
        prefix=prefix,
        middle=middle,
        suffix=suffix,
        pad=pad,
        breaks=tuple(sorted({end, *_special_ids(tokenizer)} - {split})),
        encode=tokenizer.encode,
        decode=tokenizer.decode,
        split=split,
        fragment_rate=config.fim_fragment_rate or 0.0,
        no_prefix=config.fim_no_prefix,
    )


def _token(config: FimConfig, name: str, tokenizer: Any) -> int:
    """Return the id of the one token that a flag names."""
    word = getattr(config, name)
    found: int | None = tokenizer.token_id(word)
    if found is not None:
        return found
    ids = tokenizer.encode(word)
    if len(ids) == 1:
        return int(ids[0])
    raise UserError(
        f"{flag_of(FimConfig, name)} {word!r} is no token of the {tokenizer.kind}; name one that "
        "is, or add it with --tokenizer-special-tokens"
    )


def _special_ids(tokenizer: Any) -> set[int]:
    ids: set[int] = set()
    for value in dataclasses.asdict(tokenizer.special).values():
        ids.update([value] if isinstance(value, int) else value or ())
    return ids
