"""TikTokenizer: rank files and tekken JSON, patterns, special tokens."""

import json
from pathlib import Path

import pytest
import regex

from megatron.core.tokenizers.tik import PATTERNS
from tests.unit import tokenizer_files as files
from tests.unit.tokenizer_files import build

MERGES = files.train_merges(files.NUM_MERGES)
SIZE = 256 + len(MERGES)


def test_a_rank_file_gives_the_ids_of_plain_bpe(tmp_path: Path) -> None:
    path = files.write_rank_file(tmp_path / "r.tiktoken", MERGES)
    tokenizer = build(tokenizer_type="TikTokenizer", tokenizer_model=path, tiktoken_pattern="gpt2")
    ids = {token: i for i, token in enumerate(files.all_tokens(MERGES))}
    for text in files.TEXT:
        tokens = files.plain_bpe(text, files.GPT2_PATTERN, MERGES)
        assert tokenizer.encode(text) == [ids[token] for token in tokens], text
    assert (tokenizer.eod, tokenizer.vocab_size) == (SIZE, SIZE + 1)


def test_a_rank_file_takes_special_tokens_by_number(tmp_path: Path) -> None:
    path = files.write_rank_file(tmp_path / "r.tiktoken", MERGES)
    given = {"tokenizer_model": path, "tiktoken_pattern": "cl100k"}
    tokenizer = build(
        tokenizer_type="TikTokenizer",
        tokenizer_special_tokens=(f"<|endoftext|>={SIZE + 1}", "<x>", f"<y>={SIZE + 9}"),
        **given,
    )
    assert tokenizer.eod == SIZE + 1
    assert [tokenizer.token_id(name) for name in ("<x>", "<y>")] == [SIZE + 2, SIZE + 9]
    assert tokenizer.vocab_size == SIZE + 10
    assert tokenizer.decode([65, SIZE + 5, SIZE + 9]) == "A<y>"
    with pytest.raises(ValueError, match=f"<x>=7: that id is taken.*{SIZE}"):
        build(tokenizer_type="TikTokenizer", tokenizer_special_tokens=("<x>=7",), **given)


def test_a_rank_file_must_be_given_its_pattern(tmp_path: Path) -> None:
    path = files.write_rank_file(tmp_path / "r.tiktoken", MERGES)
    with pytest.raises(ValueError, match="--tiktoken-pattern.*cl100k"):
        build(tokenizer_type="TikTokenizer", tokenizer_model=path)
    with pytest.raises(ValueError, match="--tiktoken-pattern .* is not a regular expression"):
        build(tokenizer_type="TikTokenizer", tokenizer_model=path, tiktoken_pattern="(")


def test_a_pattern_decides_where_tokens_end(tmp_path: Path) -> None:
    path = files.write_rank_file(tmp_path / "r.tiktoken", MERGES)
    given = {"tokenizer_type": "TikTokenizer", "tokenizer_model": path}
    single = build(tiktoken_pattern=r"(?s).", **given)
    assert single.encode("the") == [ord(c) for c in "the"]
    assert build(tiktoken_pattern="v2", **given).encode("the") != single.encode("the")


def test_tekken_puts_special_tokens_first(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(files.tekken_entries(MERGES)))
    given = {"tokenizer_type": "TikTokenizer", "tokenizer_model": str(path)}
    tokenizer = build(**given)
    special = tokenizer.special
    assert (special.bos, special.eos, special.eod, special.mask, special.pad) == (1, 2, 2, 3, 4)
    assert tokenizer.encode("A") == [1000 + 65]
    assert tokenizer.decode([7, 1065]) == "<SPECIAL_7>A"
    assert tokenizer.vocab_size == 1000 + SIZE
    small = build(
        tokenizer_special_tokens=("</s>", "<chat>"),
        tiktoken_num_special_tokens=4,
        vocab_size=270,
        **given,
    )
    assert (small.vocab_size, small.eod, small.token_id("<chat>")) == (270, 0, 1)
    # 266 ranks are left: 256 bytes and the first ten merges.
    tokens = files.plain_bpe("the sea", files.GPT2_PATTERN, MERGES[:10])
    ids = {token: 4 + i for i, token in enumerate(files.all_tokens(MERGES[:10]))}
    assert small.encode("the sea") == [ids[token] for token in tokens]


def test_mistrals_tekken_says_its_pattern_and_sizes(tmp_path: Path) -> None:
    content = {
        "config": {
            "pattern": r"(?s).",
            "num_vocab_tokens": SIZE,
            "default_vocab_size": 300,
            "default_num_special_tokens": 10,
            "version": "v3",
        },
        "vocab": files.tekken_entries(MERGES),
    }
    path = tmp_path / "tekken.json"
    path.write_text(json.dumps(content))
    given = {"tokenizer_type": "TikTokenizer", "tokenizer_model": str(path)}
    tokenizer = build(**given)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (300, 2, None)
    assert tokenizer.encode("the") == [10 + ord(c) for c in "the"]
    assert len(build(tiktoken_pattern="v1", **given).encode("the")) < 3
    names = ["<unk>", "<s>", "</s>", "[INST]"]
    special = [{"rank": i, "token_str": name, "is_control": True} for i, name in enumerate(names)]
    path.write_text(json.dumps(content | {"special_tokens": special}))
    assert build(**given).token_id("[INST]") == 3


@pytest.mark.parametrize(("name", "function"), [("cl100k", "cl100k_base"), ("o200k", "o200k_base")])
def test_named_patterns_split_as_the_librarys_own(
    name: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    public = pytest.importorskip("tiktoken_ext.openai_public")
    # Only the pattern is wanted; the ranks would be fetched.
    monkeypatch.setattr(public, "load_tiktoken_bpe", lambda *_, **__: {})
    theirs = getattr(public, function)()["pat_str"]
    texts = [*files.SAMPLES, *files.TEXT, "THEY'LL WE'RE camelCase ABCdef 1234567 a\r\n\r\n  b /\n"]
    for text in texts:
        expected = [match.group() for match in regex.finditer(theirs, text)]
        assert [match.group() for match in regex.finditer(PATTERNS[name], text)] == expected


def test_gpt2_pattern_splits_as_gpt2() -> None:
    for text in [*files.SAMPLES, *files.TEXT, "it's WE'RE they'll 12a_b  c"]:
        expected = regex.findall(files.GPT2_PATTERN, text)
        assert regex.findall(PATTERNS["gpt2"], text) == expected
