"""Tokenizers: ids as the file says and nothing more, from each file format."""

import hashlib
import json
import string
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from megatron.core.tokenizers import library
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import MODULES
from megatron.core.tokenizers.config import TOKENIZER_TYPES
from megatron.core.tokenizers.tik import PATTERNS
from tests.unit import tokenizer_files as files
from tests.unit.tokenizer_files import build, write_hugging_face

MERGES = files.train_merges(files.NUM_MERGES)
SIZE = 256 + len(MERGES)


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("sentencepiece") / "tiny.model"
    path.write_bytes(files.sentencepiece_model())
    return str(path)


def gpt2(folder: Path, **values: Any) -> Tokenizer:
    vocab, merges = files.write_gpt2(folder, MERGES)
    return build(vocab_file=vocab, merge_file=merges, **values)


def byte_level_json() -> dict[str, Any]:
    letters = files.byte_letters()
    vocab = {letter: b for b, letter in enumerate(letters)}
    base = files.word_level_json(["?"], [])
    return base | {
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }


@pytest.fixture(params=["gpt2", "hf", "sentencepiece", "legacy", "ranks", "tekken", "bytes"])
def lossless(request: pytest.FixtureRequest, tmp_path: Path, model_file: str) -> Tokenizer:
    """Every kind of tokenizer that can spell any text."""
    match request.param:
        case "gpt2":
            return gpt2(tmp_path)
        case "hf":
            folder = write_hugging_face(tmp_path / "hf", byte_level_json())
            return build(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=folder)
        case "sentencepiece":
            return build(tokenizer_type="Llama2Tokenizer", tokenizer_model=model_file)
        case "legacy":
            return build(
                tokenizer_type="SentencePieceTokenizer",
                tokenizer_model=model_file,
                tokenizer_sentencepiece_legacy=True,
            )
        case "ranks":
            path = files.write_rank_file(tmp_path / "r.tiktoken", MERGES)
            return build(
                tokenizer_type="TikTokenizer", tokenizer_model=path, tiktoken_pattern="gpt2"
            )
        case "tekken":
            path = str(tmp_path / "t.json")
            Path(path).write_text(json.dumps(files.tekken_entries(MERGES)))
            return build(tokenizer_type="TikTokenizer", tokenizer_model=path)
    return build(tokenizer_type="ByteLevelTokenizer")


# What holds for every kind


def test_any_text_comes_back(lossless: Tokenizer) -> None:
    for text in files.SAMPLES:
        assert lossless.decode(lossless.encode(text)) == text


def test_ids_lie_in_the_vocabulary_and_none_is_special(lossless: Tokenizer) -> None:
    special = {lossless.eod, lossless.pad, lossless.bos, lossless.eos} - {None}
    for text in files.SAMPLES:
        ids = lossless.encode(text)
        assert not special & set(ids), text
        assert all(0 <= i < lossless.vocab_size for i in ids)
    assert all(0 <= i < lossless.vocab_size for i in special if i is not None)


def test_a_batch_gives_what_single_texts_give(lossless: Tokenizer) -> None:
    texts = files.SAMPLES * 5
    expected = [lossless.encode(text) for text in texts]
    for num_threads in (1, 2):
        batch = lossless.encode_batch(texts, num_threads)
        assert [np.asarray(ids, dtype=np.int64).tolist() for ids in batch] == expected
    assert lossless.encode_batch([]) == []


def test_threads_of_the_library_are_the_users_or_else_as_asked() -> None:
    environ = {"OTHER": "1"}
    assert library.use_threads(environ, 1) == {"TOKENIZERS_PARALLELISM": "false"}
    assert environ == {"OTHER": "1", "TOKENIZERS_PARALLELISM": "false"}
    assert library.use_threads(environ, 4) == {"RAYON_NUM_THREADS": "4"}
    assert environ["TOKENIZERS_PARALLELISM"] == "false"
    fresh: dict[str, str] = {}
    library.use_threads(fresh, 4)
    assert fresh == {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": "4"}


def test_an_id_out_of_range_is_named(lossless: Tokenizer) -> None:
    for bad in (-1, lossless.vocab_size):
        with pytest.raises(
            ValueError, match=rf"id {bad} at position 1 .*{lossless.vocab_size - 1}"
        ):
            lossless.decode([65, bad])


def test_decode_takes_arrays_and_cut_characters(lossless: Tokenizer) -> None:
    ids = lossless.encode("日本")
    assert lossless.decode(np.array(ids, dtype=np.uint16)) == "日本"
    assert isinstance(lossless.decode(ids[:-1]), str)


def test_half_a_surrogate_pair_is_refused(lossless: Tokenizer) -> None:
    text = json.loads('"ab\\ud800"')
    with pytest.raises(ValueError, match="character 2 .*surrogate"):
        lossless.encode(text)
    with pytest.raises(ValueError, match="character 2 .*surrogate"):
        lossless.encode_batch(["fine", text])


# GPT-2


def test_gpt2_gives_the_ids_of_plain_bpe(tmp_path: Path) -> None:
    tokenizer = gpt2(tmp_path)
    ids = {token: i for i, token in enumerate(files.all_tokens(MERGES))}
    for text in [*files.SAMPLES, *files.TEXT]:
        tokens = files.plain_bpe(text, files.GPT2_PATTERN, MERGES)
        assert tokenizer.encode(text) == [ids[token] for token in tokens], text
    assert len(tokenizer.encode("The quick brown fox")) < len("The quick brown fox")


def test_gpt2_size_and_end(tmp_path: Path) -> None:
    tokenizer = gpt2(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.eos) == (SIZE + 1, SIZE, SIZE)
    assert tokenizer.decode([65, SIZE]) == "A<|endoftext|>"
    assert tokenizer.token_id("<|endoftext|>") == SIZE


def test_gpt2_added_tokens_and_sentinels(tmp_path: Path) -> None:
    tokenizer = gpt2(tmp_path, tokenizer_special_tokens=("<sep>",), vocab_extra_ids=2)
    assert tokenizer.vocab_size == SIZE + 4
    assert tokenizer.token_id("<sep>") == SIZE + 1
    assert tokenizer.special.sentinels == (SIZE + 2, SIZE + 3)
    assert tokenizer.decode([SIZE + 2]) == "<extra_id_0>"
    assert SIZE + 1 not in tokenizer.encode("a <sep> b")


def test_gpt2_reads_windows_line_ends(tmp_path: Path) -> None:
    vocab, merges = files.write_gpt2(tmp_path, MERGES)
    Path(merges).write_bytes(Path(merges).read_bytes().replace(b"\n", b"\r\n"))
    tokenizer = build(vocab_file=vocab, merge_file=merges)
    assert tokenizer.encode(files.TEXT[0]) == gpt2(tmp_path).encode(files.TEXT[0])


def test_pre_12_the_cache_of_merged_words_is_bounded(tmp_path: Path) -> None:
    tokenizer = gpt2(tmp_path)
    letters = np.array(list(string.ascii_lowercase))
    draws = np.random.default_rng(0).choice(letters, size=(300_000, 12))
    words = draws.view("U12").ravel().tolist()
    texts = [" ".join(words[i : i + 1000]) for i in range(0, len(words), 1000)]
    tokenizer.encode_batch(texts[:30])  # fills the cache three times over
    before = psutil.Process().memory_info().rss
    for i in range(30, len(texts), 10):
        tokenizer.encode_batch(texts[i : i + 10])
    grown = psutil.Process().memory_info().rss - before
    # 270 000 more words at 200 bytes or more each would be 54 MB.
    assert grown < 20e6
    ids = {token: i for i, token in enumerate(files.all_tokens(MERGES))}
    for word in words[::10_000]:
        tokens = files.plain_bpe(word, files.GPT2_PATTERN, MERGES)
        assert tokenizer.encode(word) == [ids[token] for token in tokens]


# BERT

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "play", "##ing", "Play", "cafe", ",", "##s"]


def bert(folder: Path, kind: str, **values: Any) -> Tokenizer:
    path = folder / "vocab.txt"
    path.write_text("\n".join(PIECES) + "\n", encoding="utf-8")
    return build(tokenizer_type=kind, vocab_file=str(path), **values)


def test_word_pieces_with_and_without_case(tmp_path: Path) -> None:
    lower = bert(tmp_path, "BertWordPieceLowerCase")
    cased = bert(tmp_path, "BertWordPieceCase")
    text = "Playing plays, Café zebra"
    assert lower.encode(text) == [5, 6, 5, 10, 9, 8, 1]
    assert cased.encode(text) == [7, 6, 5, 10, 9, 1, 1]
    assert lower.decode([5, 6, 9, 8]) == "playing, cafe"


def test_word_pieces_know_their_special_tokens(tmp_path: Path) -> None:
    tokenizer = bert(tmp_path, "BertWordPieceCase", vocab_extra_ids=3)
    special = tokenizer.special
    assert (special.pad, special.cls, special.sep, special.mask) == (0, 2, 3, 4)
    assert (special.bos, special.eos, special.eod) == (11, 12, 12)
    assert special.sentinels == (13, 14, 15)
    assert tokenizer.vocab_size == 16
    assert not {2, 3, 11} & set(tokenizer.encode("[CLS] play [SEP] [BOS]"))


# Without files


def test_bytes_are_ids() -> None:
    tokenizer = build(tokenizer_type="ByteLevelTokenizer")
    assert tokenizer.encode("Aé") == [0x41, 0xC3, 0xA9]
    assert (tokenizer.eod, tokenizer.pad, tokenizer.vocab_size) == (256, 257, 258)
    assert tokenizer.decode([0x41, 256, 0xC3]) == "A<eod>\ufffd"
    other = build(
        tokenizer_type="ByteLevelTokenizer", tokenizer_special_tokens=("<end>",), vocab_extra_ids=1
    )
    assert (other.eod, other.pad, other.vocab_size) == (256, None, 258)
    assert other.special.sentinels == (257,)


def test_null_reads_ids() -> None:
    tokenizer = build(tokenizer_type="NullTokenizer", vocab_size=100)
    assert tokenizer.encode(" 5 17\n99 ") == [5, 17, 99]
    assert tokenizer.encode("") == []
    assert tokenizer.decode([5, 17]) == "5 17"
    assert (tokenizer.eod, tokenizer.vocab_size, tokenizer.pad) == (100, 101, None)
    for bad in ("5 hello", "101", "-1", "1.5", "²"):
        with pytest.raises(ValueError, match="ids from 0 to 100"):
            tokenizer.encode(bad)


def test_null_with_its_own_end_and_padding() -> None:
    given = {"tokenizer_type": "NullTokenizer", "vocab_size": 100}
    tokenizer = build(null_tokenizer_eod_id=0, null_tokenizer_pad_id=3, **given)
    assert (tokenizer.eod, tokenizer.pad, tokenizer.vocab_size) == (0, 3, 100)
    with pytest.raises(ValueError, match="--null-tokenizer-eod-id"):
        build(null_tokenizer_eod_id=101, **given)
    with pytest.raises(ValueError, match="--null-tokenizer-pad-id"):
        build(null_tokenizer_pad_id=101, **given)


# Who made these ids


def test_tok_04_the_fingerprint_knows_contents_and_options_but_not_paths(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "c").mkdir()
    here, there = gpt2(tmp_path / "a"), gpt2(tmp_path / "b")
    assert here.fingerprint() == there.fingerprint()
    assert here.unique_identifiers == there.unique_identifiers
    vocab, merges = files.write_gpt2(tmp_path / "c", MERGES[:-1])
    others = [
        build(vocab_file=vocab, merge_file=merges),
        gpt2(tmp_path / "a", vocab_extra_ids=1),
        gpt2(tmp_path / "a", tokenizer_special_tokens=("<x>",)),
        bert(tmp_path, "BertWordPieceCase"),
        bert(tmp_path, "BertWordPieceLowerCase"),
        build(tokenizer_type="ByteLevelTokenizer"),
        build(tokenizer_type="NullTokenizer", vocab_size=10),
        build(tokenizer_type="NullTokenizer", vocab_size=10, null_tokenizer_eod_id=1),
    ]
    prints = [other.fingerprint() for other in [here, *others]]
    assert len(set(prints)) == len(prints)


def test_the_fingerprint_knows_contents_of_equal_size(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    vocab, merges = files.write_gpt2(tmp_path / "other", MERGES)
    lines = Path(merges).read_text(encoding="utf-8").split("\n")
    Path(merges).write_text("\n".join([lines[0], lines[2], lines[1], *lines[3:]]), encoding="utf-8")
    other = build(vocab_file=vocab, merge_file=merges)
    here = gpt2(tmp_path)
    assert other.vocab_size == here.vocab_size
    assert other.fingerprint() != here.fingerprint()


def test_the_fingerprint_follows_the_pattern(tmp_path: Path) -> None:
    path = files.write_rank_file(tmp_path / "r.tiktoken", MERGES)
    given = {"tokenizer_type": "TikTokenizer", "tokenizer_model": path}
    v1, v2 = (build(tiktoken_pattern=name, **given).fingerprint() for name in ("v1", "v2"))
    assert v1 != v2
    assert build(tiktoken_pattern=PATTERNS["v1"], **given).fingerprint() == v1


def test_kinds_that_give_equal_ids_have_equal_fingerprints(model_file: str) -> None:
    llama, gpt = (
        build(tokenizer_type=kind, tokenizer_model=model_file)
        for kind in ("Llama2Tokenizer", "GPTSentencePieceTokenizer")
    )
    assert llama.fingerprint() == gpt.fingerprint()


def test_a_fingerprint_in_a_data_set_stays_good() -> None:
    """Fixed once: a change here would make every existing data set look foreign."""
    written = (
        '{"eod": 256, "family": "bytes", "files": [], '
        '"options": {"special": ["<eod>", "<pad>"]}, "vocab_size": 258}'
    )
    tokenizer = build(tokenizer_type="ByteLevelTokenizer")
    assert tokenizer.fingerprint() == hashlib.sha256(written.encode()).hexdigest()


@pytest.mark.parametrize("kind", ["gpt2", "bert", "hf", "sentencepiece", "legacy", "bytes"])
def test_without_sentinels_tokenizers_of_equal_ids_are_equal(
    kind: str, tmp_path: Path, model_file: str
) -> None:
    """The fingerprint without sentinels is the one that the tokenizer has if none are added."""
    flags: dict[str, Any] = {"tokenizer_type": "ByteLevelTokenizer"}
    if kind == "gpt2":
        flags = dict(
            zip(("vocab_file", "merge_file"), files.write_gpt2(tmp_path, MERGES), strict=True)
        )
    elif kind == "bert":
        lines = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red"]
        (tmp_path / "vocab.txt").write_text("\n".join(lines))
        flags = {"vocab_file": str(tmp_path / "vocab.txt")}
    elif kind == "hf":
        folder = write_hugging_face(tmp_path / "hf", byte_level_json())
        flags = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": folder}
    elif kind != "bytes":
        flags = {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": model_file}
        flags["tokenizer_sentencepiece_legacy"] = kind == "legacy"
    plain = build(**flags)
    assert plain.without_sentinels() == plain.fingerprint()
    several = [build(vocab_extra_ids=count, **flags) for count in (1, 3, 100)]
    assert {one.without_sentinels() for one in several} == {plain.fingerprint()}
    assert len({one.fingerprint() for one in (plain, *several)}) == 4
    for text in (*files.SAMPLES, "<extra_id_0> red"):
        assert {tuple(one.encode(text)) for one in several} == {tuple(plain.encode(text))}
    if kind != "sentencepiece":  # which takes them with the flag of "legacy"
        other = build(vocab_extra_ids=3, **flags, tokenizer_special_tokens=("<x>",))
        assert other.without_sentinels() != plain.fingerprint()


def test_sentinels_of_the_vocabulary_count_where_texts_have_them(tmp_path: Path) -> None:
    """A word that the flag makes a special token is spelled out from then on: other ids."""
    special = files.word_level_json(["?", "red"], ["<extra_id_0>"])
    words = files.word_level_json(["?", "red", "<extra_id_0>"], [])
    for content, is_word in ((special, False), (words, True)):
        folder = write_hugging_face(tmp_path / str(is_word), content)
        flags = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": folder}
        plain, several = build(**flags), [build(vocab_extra_ids=n, **flags) for n in (1, 4)]
        text = "red <extra_id_0>"
        differ = several[0].encode(text) != plain.encode(text)
        assert differ == is_word
        assert several[0].encode(text) == several[1].encode(text)
        assert (several[0].without_sentinels() != plain.fingerprint()) == differ
        assert several[0].without_sentinels() == several[1].without_sentinels()


def test_every_type_can_be_built() -> None:
    assert set(MODULES) == set(TOKENIZER_TYPES)
