"""The sentencepiece kinds: a model's own ids, and the tokens that older data has behind them."""

from pathlib import Path

import pytest
import sentencepiece

from tests.unit import tokenizer_files as files
from tests.unit.tokenizer_files import build


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("sentencepiece") / "tiny.model"
    path.write_bytes(files.sentencepiece_model())
    return str(path)


def test_sentencepiece_ids_are_those_of_its_pieces(model_file: str) -> None:
    library = sentencepiece.SentencePieceProcessor(model_file=model_file)
    pieces = [library.id_to_piece(i) for i in range(library.get_piece_size())]
    tokenizer = build(tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model=model_file)
    for text in files.SAMPLES:
        ids = tokenizer.encode(text)
        assert [pieces[i] for i in ids] == library.encode(text, out_type=str)
    assert tokenizer.vocab_size == len(pieces)
    # The trainer's usual places: <unk> 0, <s> 1, </s> 2, no padding.
    assert (tokenizer.bos, tokenizer.eos, tokenizer.eod, tokenizer.pad) == (1, 2, 2, None)


def test_legacy_sentencepiece_adds_the_classic_tokens(model_file: str) -> None:
    plain = build(tokenizer_type="SentencePieceTokenizer", tokenizer_model=model_file)
    legacy = build(
        tokenizer_type="SentencePieceTokenizer",
        tokenizer_model=model_file,
        tokenizer_sentencepiece_legacy=True,
        vocab_extra_ids=2,
    )
    n = plain.vocab_size
    special = legacy.special
    assert (special.cls, special.sep, special.eod, special.mask) == (n, n + 1, n + 2, n + 3)
    assert (special.pad, special.bos, special.eos) == (n + 4, 1, 2)
    assert special.sentinels == (n + 5, n + 6)
    assert legacy.vocab_size == n + 7
    ids = [*legacy.encode("sea"), n + 2, *legacy.encode("shore")]
    assert legacy.decode(ids) == "sea <EOD> shore"
    assert legacy.encode("the <EOD>") == plain.encode("the <EOD>")


def test_special_tokens_behind_a_sentencepiece_model_need_the_legacy_flag(model_file: str) -> None:
    given = {"tokenizer_model": model_file, "tokenizer_special_tokens": ("<a>", "<b>")}
    with pytest.raises(ValueError, match="--tokenizer-sentencepiece-legacy"):
        build(tokenizer_type="Llama2Tokenizer", **given)
    tokenizer = build(
        tokenizer_type="Llama2Tokenizer", tokenizer_sentencepiece_legacy=True, **given
    )
    assert tokenizer.token_id("<b>") == tokenizer.vocab_size - 1
    assert tokenizer.eod == 2


def test_legacy_keeps_tokens_that_the_model_has(tmp_path: Path) -> None:
    path = tmp_path / "own.model"
    path.write_bytes(files.sentencepiece_model(control_symbols=["<SEP>", "<EOD>"], pad_id=3))
    tokenizer = build(
        tokenizer_type="SentencePieceTokenizer",
        tokenizer_model=str(path),
        tokenizer_sentencepiece_legacy=True,
    )
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(path)).get_piece_size()
    special = tokenizer.special
    # The trainer numbers control symbols right after <unk>, <s>, </s> and <pad>.
    assert (special.pad, special.sep, special.eod) == (3, 4, 5)
    assert (special.cls, special.mask) == (pieces, pieces + 1)
    assert tokenizer.vocab_size == pieces + 2
    assert not {4, 5} & set(tokenizer.encode("the <EOD> and <SEP>"))
