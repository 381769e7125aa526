"""The three vocabulary sizes: ids in use, rows, padded rows."""

import pytest

from megatron.core.tokenizers.config import TokenizerConfig
from megatron.core.tokenizers.vocabulary import (
    Vocabulary,
    check_ids_fit,
    padded_vocab_size,
    resolve_vocabulary,
)


@pytest.mark.parametrize(
    ("rows", "divisible_by", "tensor_parallel", "padded"),
    [
        (50257, 128, 1, 50304),
        (50257, 128, 8, 51200),
        (32000, 128, 2, 32000),
        (1, 128, 4, 512),
        (101, 1, 1, 101),
        (101, 1, 2, 102),
    ],
)
def test_padding(rows: int, divisible_by: int, tensor_parallel: int, padded: int) -> None:
    assert padded_vocab_size(rows, divisible_by, tensor_parallel) == padded


def sizes(ids_in_use: int, tensor_parallel: int = 1, **values: object) -> Vocabulary:
    return resolve_vocabulary(TokenizerConfig.resolve(**values), ids_in_use, tensor_parallel)


def test_rows_are_the_tokenizers_unless_a_flag_says_more() -> None:
    assert sizes(50257) == Vocabulary(ids_in_use=50257, rows=50257, padded_rows=50304)
    wider = sizes(50257, vocab_size=50300, make_vocab_size_divisible_by=10)
    assert wider == Vocabulary(ids_in_use=50257, rows=50300, padded_rows=50300)


def test_a_null_tokenizers_size_leaves_out_the_end_of_document() -> None:
    vocabulary = sizes(1001, tokenizer_type="NullTokenizer", vocab_size=1000)
    assert (vocabulary.rows, vocabulary.padded_rows) == (1001, 1024)


def test_tok_02_fewer_rows_than_ids_is_refused() -> None:
    with pytest.raises(ValueError, match="32004 ids .* 32000 rows.*32000 to 32003.*--vocab-size"):
        sizes(32004, vocab_size=32000)
    check_ids_fit(32000, 32000)
    with pytest.raises(ValueError, match="the data has 10 ids"):
        check_ids_fit(10, 9, "the data")


def test_a_padded_size_given_outright() -> None:
    assert sizes(100, padded_vocab_size=102, tensor_parallel=2).padded_rows == 102
    with pytest.raises(ValueError, match=r"--padded-vocab-size \(99\).*try 100"):
        sizes(100, padded_vocab_size=99)
    with pytest.raises(ValueError, match=r"--padded-vocab-size \(101\).*try 102"):
        sizes(100, padded_vocab_size=101, tensor_parallel=2)


def test_no_padding_at_all() -> None:
    assert sizes(102, pad_vocab_size=False, tensor_parallel=2).padded_rows == 102
    with pytest.raises(ValueError, match="--no-pad-vocab-size"):
        sizes(101, pad_vocab_size=False, tensor_parallel=2)
