"""The three sizes of a vocabulary, which are easily taken for one another.

- ids in use: what the tokenizer can produce, added tokens included (``tokenizer.vocab_size``);
- rows: entries of the vocabulary as the model knows them (``--vocab-size``, or the ids in use);
- padded rows: rows rounded up so that they split evenly over tensor-parallel ranks.

Ids in use and rows are stored with a model; padded rows follow from the layout and never are.
"""

from dataclasses import dataclass

from megatron.core.tokenizers.config import TokenizerConfig
from megatron.core.utils import UserError, round_up


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The sizes of one vocabulary on one layout."""

    ids_in_use: int
    rows: int
    padded_rows: int


def padded_vocab_size(rows: int, divisible_by: int, tensor_parallel: int) -> int:
    """Return ``rows`` rounded up to a multiple of ``divisible_by * tensor_parallel``."""
    return round_up(rows, divisible_by * tensor_parallel)


def check_ids_fit(ids_in_use: int, rows: int, what: str = "the tokenizer") -> None:
    """Refuse a vocabulary that has ids for which the model has no row.

    Raises:
        UserError: ``ids_in_use`` exceeds ``rows``.
    """
    if ids_in_use > rows:
        raise UserError(
            f"{what} has {ids_in_use} ids but the model's vocabulary has {rows} rows, so ids "
            f"{rows} to {ids_in_use - 1} would have none; leave out --vocab-size or give at least "
            f"{ids_in_use}"
        )


def resolve_vocabulary(
    config: TokenizerConfig, ids_in_use: int, tensor_parallel: int = 1
) -> Vocabulary:
    """Return the sizes that ``config`` gives to a tokenizer of ``ids_in_use`` ids.

    Raises:
        UserError: the flags contradict the tokenizer or each other.
    """
    rows = ids_in_use
    # A null tokenizer's --vocab-size leaves out the end-of-document id, and has made its ids of it.
    if config.vocab_size is not None and config.tokenizer_type != "NullTokenizer":
        rows = config.vocab_size
        check_ids_fit(ids_in_use, rows)
    return Vocabulary(
        ids_in_use=ids_in_use, rows=rows, padded_rows=_padded_rows(config, rows, tensor_parallel)
    )


def _padded_rows(config: TokenizerConfig, rows: int, tensor_parallel: int) -> int:
    padded = config.padded_vocab_size
    if padded is not None:
        if padded < rows or padded % tensor_parallel:
            least = round_up(max(rows, padded), tensor_parallel)
            raise UserError(
                f"--padded-vocab-size ({padded}) must be at least the vocabulary ({rows}) and "
                f"divide by --tensor-model-parallel-size ({tensor_parallel}); try {least}"
            )
        return padded
    if config.pad_vocab_size:
        return padded_vocab_size(rows, config.make_vocab_size_divisible_by, tensor_parallel)
    if rows % tensor_parallel:
        raise UserError(
            f"--no-pad-vocab-size needs a vocabulary ({rows}) that divides by "
            f"--tensor-model-parallel-size ({tensor_parallel}); leave the flag out"
        )
    return rows
