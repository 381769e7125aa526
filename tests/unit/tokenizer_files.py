"""Tiny tokenizer files in every real format, made on the spot, and a plain BPE to compare with."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import regex
import sentencepiece

from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.config import TokenizerConfig

NUM_MERGES = 150
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

TEXT = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on; it doesn't mind.",
    "She sells sea shells by the sea shore. The shells she sells are sea shells, I'm sure.",
    "Counting 1 2 3, then 10 20 30, and 2024 at last!",
    "Wir gehen über die Brücke. Съешь же ещё этих мягких булок. いろはにほへと ちりぬるを",
]

SAMPLES = [
    "",
    " ",
    "a",
    "The quick brown fox doesn't jump.",
    "two  spaces,   three,\ttab\n\nlines  \n end ",
    "日本語のテキスト、いろは",
    "Съешь же ещё этих мягких булок",
    "family 👨‍👩‍👧 and flags 🇫🇷🇯🇵 🙂",
    "nul \x00 and bell \x07",
    "<|endoftext|> </s> <s> [SEP] <pad>",
    "x = {'a': 1.5e-3}  # comment",
]


def build(**values: Any) -> Tokenizer:
    """Return the tokenizer that flags of these values ask for."""
    return build_tokenizer(TokenizerConfig.resolve(**values))


def byte_letters() -> list[str]:
    """Return the printable character that stands for each byte in GPT-2's files."""
    keep = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(b) if b in keep else chr(next(spare)) for b in range(256)]


def train_merges(count: int) -> list[tuple[bytes, bytes]]:
    """Return the first ``count`` merges of byte-level BPE on `TEXT`, learned the plain way."""
    words = [
        [bytes([b]) for b in word.encode()]
        for text in TEXT
        for word in regex.findall(GPT2_PATTERN, text)
    ]
    merges = []
    for _ in range(count):
        pairs: dict[tuple[bytes, bytes], int] = {}
        for word in words:
            for pair in zip(word, word[1:], strict=False):
                pairs[pair] = pairs.get(pair, 0) + 1
        best = max(sorted(pairs), key=lambda pair: pairs[pair])
        merges.append(best)
        words = [join(word, best) for word in words]
    return merges


def join(word: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    """Return ``word`` with each occurrence of ``pair``, from the left, made one."""
    out: list[bytes] = []
    i = 0
    while i < len(word):
        if tuple(word[i : i + 2]) == pair:
            out.append(word[i] + word[i + 1])
            i += 2
        else:
            out.append(word[i])
            i += 1
    return out


def plain_bpe(text: str, pattern: str, merges: list[tuple[bytes, bytes]]) -> list[bytes]:
    """Return the tokens of ``text``: every merge in order, over every word."""
    tokens: list[bytes] = []
    for match in regex.finditer(pattern, text):
        word = [bytes([b]) for b in match.group().encode()]
        for pair in merges:
            word = join(word, pair)
        tokens += word
    return tokens


def write_gpt2(folder: Path, merges: list[tuple[bytes, bytes]], end: bool = True) -> list[str]:
    """Write vocab.json and merges.txt; return the flags' values in order."""
    letters = byte_letters()
    spell = lambda token: "".join(letters[b] for b in token)  # noqa: E731
    vocab = {letters[b]: b for b in range(256)}
    for left, right in merges:
        vocab[spell(left + right)] = len(vocab)
    if end:
        vocab["<|endoftext|>"] = len(vocab)
    lines = ["#version: 0.2", *(f"{spell(a)} {spell(b)}" for a, b in merges), ""]
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (folder / "merges.txt").write_text("\n".join(lines), encoding="utf-8")
    return [str(folder / "vocab.json"), str(folder / "merges.txt")]


def write_rank_file(path: Path, merges: list[tuple[bytes, bytes]]) -> str:
    """Write a .tiktoken file: a base64 token and its rank per line."""
    lines = [
        base64.b64encode(token) + b" " + str(rank).encode()
        for rank, token in enumerate(all_tokens(merges))
    ]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return str(path)


def all_tokens(merges: list[tuple[bytes, bytes]]) -> list[bytes]:
    """Return single bytes, then merged tokens in order of rank."""
    return [bytes([b]) for b in range(256)] + [left + right for left, right in merges]


def tekken_entries(merges: list[tuple[bytes, bytes]]) -> list[dict[str, Any]]:
    """Return the list of tokens of a tekken JSON."""
    return [
        {
            "rank": rank,
            "token_bytes": base64.b64encode(token).decode(),
            "token_str": token.decode("utf-8", errors="replace"),
        }
        for rank, token in enumerate(all_tokens(merges))
    ]


def sentencepiece_model(**options: Any) -> bytes:
    """Train a small sentencepiece model and return its file's bytes."""
    model = io.BytesIO()
    settings: dict[str, Any] = {
        "model_type": "bpe",
        "vocab_size": 400,
        "byte_fallback": True,
        "hard_vocab_limit": False,
        "character_coverage": 1.0,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT * 3), model_writer=model, **(settings | options)
    )
    return model.getvalue()


def word_level_json(words: list[str], special: list[str], **parts: Any) -> dict[str, Any]:
    """Return a tokenizer.json, by hand: words split at white space, special tokens after them."""
    vocab = {word: i for i, word in enumerate([*words, *special])}
    added = [
        {
            "id": vocab[name],
            "content": name,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for name in special
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": words[0]},
    } | parts


def write_hugging_face(folder: Path, content: dict[str, Any], **beside: Any) -> str:
    """Write a tokenizer.json and files beside it; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    for name, table in beside.items():
        (folder / f"{name}.json").write_text(json.dumps(table), encoding="utf-8")
    return str(folder)
