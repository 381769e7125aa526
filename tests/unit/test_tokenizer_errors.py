"""Tokenizers: whatever is wrong with flags or files is one message that names flag and path."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from megatron.core.tokenizers import files as tokenizer_io
from megatron.core.tokenizers.config import TokenizerConfig, tokenizer_type
from megatron.core.utils import UserError
from tests.unit import tokenizer_files as files
from tests.unit.tokenizer_files import build

MERGES = files.train_merges(20)
# type -> (the flag that names its file, other flags it needs)
FILE_FLAGS: dict[str, tuple[str, dict[str, Any]]] = {
    "BertWordPieceLowerCase": ("vocab_file", {}),
    "GPT2BPETokenizer": ("vocab_file", {"merge_file": "merges.txt"}),
    "HuggingFaceTokenizer": ("tokenizer_model", {}),
    "SentencePieceTokenizer": ("tokenizer_model", {}),
    "GPTSentencePieceTokenizer": ("tokenizer_model", {}),
    "Llama2Tokenizer": ("tokenizer_model", {}),
    "TikTokenizer": ("tokenizer_model", {"tiktoken_pattern": "v2"}),
}


def refusal(**values: Any) -> str:
    with pytest.raises(UserError) as caught:
        build(**values)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("kind", FILE_FLAGS)
def test_a_missing_flag_is_named(kind: str) -> None:
    name, _ = FILE_FLAGS[kind]
    message = refusal(tokenizer_type=kind)
    assert kind in message and f"--{name.replace('_', '-')}" in message


@pytest.mark.parametrize("kind", FILE_FLAGS)
@pytest.mark.parametrize("wrong", ["absent", "folder", "empty", "random", "json", "merges"])
def test_a_file_that_is_none_is_named(kind: str, wrong: str, tmp_path: Path) -> None:
    files.write_gpt2(tmp_path, MERGES)
    path = tmp_path / "given"
    match wrong:
        case "folder":
            path.mkdir()
        case "empty":
            path.touch()
        case "random":
            path.write_bytes(os.urandom(5000))
        case "json":
            path.write_text('{"a": [1, 2], "b": null}')
        case "merges":
            path = tmp_path / "merges.txt"
    name, others = FILE_FLAGS[kind]
    flags = {
        key: str(tmp_path / value) if key == "merge_file" else value
        for key, value in others.items()
    }
    message = refusal(tokenizer_type=kind, **{name: str(path)}, **flags)
    assert str(path) in message
    assert f"--{name.replace('_', '-')}" in message


def test_swapped_gpt2_files(tmp_path: Path) -> None:
    vocab, merges = files.write_gpt2(tmp_path, MERGES)
    assert "--vocab-file" in refusal(vocab_file=merges, merge_file=vocab)
    message = refusal(vocab_file=vocab, merge_file=vocab)
    assert "--merge-file" in message and "line 1" in message


def test_merges_of_another_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    vocab, _ = files.write_gpt2(tmp_path / "small", MERGES[:5])
    _, merges = files.write_gpt2(tmp_path, MERGES)
    message = refusal(vocab_file=vocab, merge_file=merges)
    assert vocab in message and merges in message


def test_a_vocabulary_that_cannot_spell_every_byte(tmp_path: Path) -> None:
    vocab, merges = files.write_gpt2(tmp_path, [])
    table = json.loads(Path(vocab).read_text())
    del table["z"]
    Path(vocab).write_text(json.dumps(table))
    assert "'z'" in refusal(vocab_file=vocab, merge_file=merges)
    ranks = tmp_path / "r.tiktoken"
    files.write_rank_file(ranks, [])
    ranks.write_bytes(b"\n".join(ranks.read_bytes().split(b"\n")[:-6]))
    message = refusal(
        tokenizer_type="TikTokenizer", tokenizer_model=str(ranks), tiktoken_pattern="v2"
    )
    assert "0xfb" in message


def test_a_tokenizer_json_in_the_wrong_place(tmp_path: Path) -> None:
    folder = files.write_hugging_face(tmp_path / "hf", files.word_level_json(["?"], []))
    path = f"{folder}/tokenizer.json"
    for flags in (
        {"vocab_file": path, "merge_file": path},
        {"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": path},
        {"tokenizer_type": "TikTokenizer", "tokenizer_model": path},
    ):
        assert "HuggingFaceTokenizer" in refusal(**flags)


def test_a_folder_of_another_kind_names_the_kind(tmp_path: Path) -> None:
    given = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(tmp_path)}
    assert "no tokenizer.json" in refusal(**given)
    files.write_gpt2(tmp_path, MERGES)
    assert "GPT2BPETokenizer --vocab-file" in refusal(**given)
    (tmp_path / "tokenizer.model").touch()
    assert "Llama2Tokenizer" in refusal(**given)


def test_a_hub_name_is_not_fetched() -> None:
    message = refusal(tokenizer_type="HuggingFaceTokenizer", tokenizer_model="someone/some-model")
    assert "download" in message


def test_a_settings_file_that_is_none(tmp_path: Path) -> None:
    folder = files.write_hugging_face(tmp_path / "hf", files.word_level_json(["?"], []))
    (tmp_path / "hf" / "tokenizer_config.json").write_text("{not json")
    message = refusal(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=folder)
    assert "tokenizer_config.json" in message


def test_word_pieces_need_the_tokens_of_bert(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    path.write_text("[PAD]\n[UNK]\n[SEP]\nword\n")
    message = refusal(tokenizer_type="BertWordPieceCase", vocab_file=str(path))
    assert "[CLS], [MASK]" in message


@pytest.mark.parametrize(
    ("line", "what"), [(b"YQ== one", "line 3"), (b"?? 300", "line 3"), (b"YWI= 0", "twice")]
)
def test_a_bad_line_of_a_rank_file(line: bytes, what: str, tmp_path: Path) -> None:
    path = tmp_path / "r.tiktoken"
    files.write_rank_file(path, MERGES)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:2], line, *lines[2:]]))
    message = refusal(
        tokenizer_type="TikTokenizer", tokenizer_model=str(path), tiktoken_pattern="v2"
    )
    assert what in message


def test_tekken_flags_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    entries = files.tekken_entries(MERGES)
    path.write_text(json.dumps(entries))
    given = {"tokenizer_type": "TikTokenizer", "tokenizer_model": str(path)}
    names = ("<unk>", "<s>", "</s>")
    message = refusal(tokenizer_special_tokens=names, tiktoken_num_special_tokens=2, **given)
    assert "--tiktoken-num-special-tokens" in message
    assert "--vocab-size (900)" in refusal(vocab_size=900, **given)
    for broken in ({"rank": 5}, {"token_bytes": "?"}, "word"):
        bad = [*entries[:3], broken if isinstance(broken, str) else entries[3] | broken]
        path.write_text(json.dumps(bad))
        assert "entry 3" in refusal(**given)


def test_no_type_lists_the_types() -> None:
    message = refusal()
    assert "--tokenizer-type" in message and "TikTokenizer" in message


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("HuggingfaceTokenizer", "HuggingFaceTokenizer"),
        ("GPT2Tokenizer", "GPT2BPETokenizer"),
        ("nulltokenizer", "NullTokenizer"),
        ("SentencePiece", "SentencePieceTokenizer"),
    ],
)
def test_an_unknown_type_names_the_nearest(name: str, meant: str) -> None:
    with pytest.raises(UserError, match=f"did you mean .*{meant}.*the types are"):
        tokenizer_type(name)
    with pytest.raises(UserError, match="--tokenizer-type"):
        TokenizerConfig(tokenizer_type=name)


def test_a_former_name_means_its_successor() -> None:
    assert tokenizer_type("PretrainedFromHF") == "HuggingFaceTokenizer"


def test_a_missing_library_says_what_to_install() -> None:
    with pytest.raises(UserError, match="pip install no_such_library"):
        tokenizer_io.import_library("no_such_library", "SomeTokenizer")


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"vocab_size": 0}, "--vocab-size"),
        ({"padded_vocab_size": -1}, "--padded-vocab-size"),
        ({"make_vocab_size_divisible_by": 0}, "--make-vocab-size-divisible-by"),
        ({"vocab_extra_ids": -1}, "--vocab-extra-ids"),
        ({"tiktoken_num_special_tokens": -1}, "--tiktoken-num-special-tokens"),
        ({"tokenizer_special_tokens": ("<a>", "<a>")}, "--tokenizer-special-tokens repeats <a>"),
        ({"tokenizer_special_tokens": ("",)}, "--tokenizer-special-tokens has an empty name"),
        ({"tiktoken_pattern": " "}, "--tiktoken-pattern"),
        ({"tokenizer_type": "NullTokenizer"}, "--vocab-size"),
    ],
)
def test_a_value_that_makes_no_sense(values: dict[str, Any], flag: str) -> None:
    assert flag in refusal(**({"tokenizer_type": "ByteLevelTokenizer"} | values))


def test_vocabulary_files_alone_say_the_type() -> None:
    """Two are GPT-2's, one is BERT's, as in scripts for Megatron-LM; one .json could be any."""
    assert (
        TokenizerConfig.resolve(vocab_file="v", merge_file="m").tokenizer_type == "GPT2BPETokenizer"
    )
    alone = TokenizerConfig.resolve(vocab_file="bert-vocab.txt")
    assert alone.tokenizer_type == "BertWordPieceLowerCase"
    assert TokenizerConfig.resolve(vocab_file="vocab.json").tokenizer_type is None
    other = TokenizerConfig.resolve(vocab_file="v", merge_file="m", tokenizer_type="NullTokenizer")
    assert other.tokenizer_type == "NullTokenizer"
