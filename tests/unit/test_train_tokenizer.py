"""tools/train_tokenizer.py, and the corpus and tokenizer that the repository ships."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from megatron.core.tokenizers.base import Tokenizer
from megatron.core.utils import UserError
from tests.unit import tokenizer_files as files
from tools import train_tokenizer

TWICE = ("--special-tokens", "<s>", "<bos>")
DATA = Path(__file__).resolve().parents[2] / "data"


def train(folder: Path, *flags: Any) -> None:
    train_tokenizer.main(["--output", str(folder), *map(str, flags)])


def load(folder: Path) -> Tokenizer:
    return files.build(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in files.TEXT))
    return path


def test_ids_are_end_bytes_and_merges(corpus: Path, tmp_path: Path) -> None:
    train(tmp_path / "out", "--input", corpus, "--vocab-size", 300, "--special-tokens", "<a>")
    tokenizer = load(tmp_path / "out")
    assert tokenizer.vocab_size == 300
    assert (tokenizer.eod, tokenizer.token_id("<a>")) == (0, 1)
    for text in [*files.SAMPLES, *files.TEXT]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(files.TEXT[1])) < len(files.TEXT[1].encode())


def test_the_commonest_pair_is_merged_first(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"text": "qz qz qzqz qzy"}) + "\n")
    train(tmp_path / "out", "--input", path, "--vocab-size", 258)
    tokenizer = load(tmp_path / "out")
    assert tokenizer.token_id("qz") == 257
    assert tokenizer.encode("qzqz") == [257, 257]


def test_special_tokens_are_what_they_are_called(corpus: Path, tmp_path: Path) -> None:
    """An encoder-decoder begins with bos or padding; an encoder needs BERT's marks."""
    names = ["<pad>", "<s>", "<a>", "[CLS]", "[SEP]", "[MASK]"]
    train(tmp_path / "out", "--input", corpus, "--vocab-size", 300, "--special-tokens", *names)
    special = load(tmp_path / "out").special
    assert (special.pad, special.bos, special.eos, special.eod) == (1, 2, 0, 0)
    assert (special.cls, special.sep, special.mask) == (4, 5, 6)
    train(tmp_path / "none", "--input", corpus, "--vocab-size", 300)
    bare = load(tmp_path / "none").special
    assert (bare.pad, bare.bos, bare.cls) == (None, None, None)


def test_a_token_in_the_settings_is_added(corpus: Path, tmp_path: Path) -> None:
    """The other way out that the refusal of a tokenizer without padding names."""
    train(tmp_path, "--input", corpus, "--vocab-size", 300)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pad_token": "<pad>"}))
    assert load(tmp_path).special.pad == 300


def test_the_same_text_gives_the_same_files(corpus: Path, tmp_path: Path) -> None:
    packed = tmp_path / "corpus.jsonl.gz"
    packed.write_bytes(gzip.compress(corpus.read_bytes()))
    for name, path in (("a", corpus), ("b", packed)):
        train(tmp_path / name, "--input", path, "--vocab-size", 320)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_what_is_wrong_is_named(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--vocab-size \(256\) must be at least 257"):
        train(tmp_path / "out", "--input", corpus, "--vocab-size", 256)
    with pytest.raises(UserError, match=r"<s> <bos>: each is the bos_token; give one"):
        train(tmp_path / "out", "--input", corpus, "--vocab-size", 300, *TWICE)
    with pytest.raises(UserError, match="absent.*no such file"):
        train(tmp_path / "out", "--input", tmp_path / "absent", "--vocab-size", 300)
    with pytest.raises(UserError, match="line 1: the key 'body' is missing"):
        train(tmp_path / "out", "--input", corpus, "--vocab-size", 300, "--json-keys", "body")
    assert not (tmp_path / "out").exists()


def test_the_shipped_corpus_and_tokenizer() -> None:
    lines = (DATA / "shakespeare.jsonl").read_text(encoding="utf-8").splitlines()
    scenes = [json.loads(line)["text"] for line in lines]
    size = sum(len(scene.encode()) for scene in scenes)
    assert 1e6 < size < 5e6
    tokenizer = load(DATA)
    assert tokenizer.vocab_size == 512
    assert tokenizer.eod == tokenizer.token_id("<|endoftext|>")
    ids = tokenizer.encode_batch(scenes[:20])
    assert [tokenizer.decode(scene) for scene in ids] == scenes[:20]
    # Bytes per token of a tokenizer that was trained on this text.
    assert sum(len(s.encode()) for s in scenes[:20]) / sum(map(len, ids)) > 1.8
