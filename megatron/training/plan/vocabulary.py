"""The tokenizer of a planned run: its vocabulary, and whether samples can be made with it.

Its files may be on other machines only; then what flags and published vocabularies say is taken.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.datasets.config import DataConfig
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.config import TokenizerConfig
from megatron.core.tokenizers.vocabulary import resolve_vocabulary
from megatron.core.utils import UserError

GPT2_IDS = 50257
BERT_IDS = {"BertWordPieceLowerCase": 30522, "BertWordPieceCase": 28996}
"""Pieces of the vocabularies that BERT was published with."""


@dataclass(frozen=True)
class PlannedVocabulary:
    """The vocabulary's rows, and how they are known."""

    rows: int
    padded_rows: int
    source: str


def load_tokenizer(config: TokenizerConfig) -> Tokenizer | UserError:
    """Return the tokenizer, or why it is not there."""
    # Its libraries take time to import.
    from megatron.core.tokenizers.build import build_tokenizer

    try:
        return build_tokenizer(config)
    except UserError as error:
        return error


def plan_vocabulary(
    config: TokenizerConfig, tokenizer: Tokenizer | UserError, tp: int
) -> PlannedVocabulary:
    """Return the rows that the flags give, or the tokenizer's files, or as a guess known ones.

    Raises:
        UserError: the flags contradict the tokenizer or each other.
    """
    source = f"{config.tokenizer_type}"
    if config.vocab_size is not None:
        source = f"--vocab-size {config.vocab_size}"
    if not isinstance(tokenizer, UserError):
        ids = tokenizer.vocab_size
    elif config.vocab_size is not None:
        ids = config.vocab_size
    else:
        ids, source = _guess(config, tokenizer)
    sizes = resolve_vocabulary(config, ids, tp)
    return PlannedVocabulary(sizes.rows, sizes.padded_rows, source)


def _guess(config: TokenizerConfig, why: UserError) -> tuple[int, str]:
    from megatron.core.tokenizers.word_piece import ADDED

    if config.padded_vocab_size is not None:
        return config.padded_vocab_size, "--padded-vocab-size"
    pieces = BERT_IDS.get(config.tokenizer_type or "")
    if pieces is None:
        return GPT2_IDS, f"GPT-2's, as a guess, because {why}"
    added = len(ADDED) + (config.vocab_extra_ids or 0)
    return pieces + added, f"BERT's and {added} more, as a guess, because {why}"


def tokenizer_notes(data: DataConfig, tokenizer: Tokenizer | UserError) -> Iterator[str]:
    """Yield what is odd about a tokenizer that is there, and what is not known of one that is not.

    Raises:
        UserError: a run would be refused for it.
    """
    # They import numpy, which takes time and is needed where there is data only.
    from megatron.core.datasets.builder import check_samples
    from megatron.core.datasets.token_info import TokenInfo

    if not isinstance(tokenizer, UserError):
        said: list[str] = []
        check_samples(data, TokenInfo.of(tokenizer), said.append)
        yield from said
    elif data.bert.masked_words:
        yield f"not known is whether the tokenizer frames texts and masks words: {tokenizer}"
    elif data.t5.decoder_seq_length is not None:
        yield f"not known is whether the tokenizer has sentinels, a begin and an end: {tokenizer}"
