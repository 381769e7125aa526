"""The file formats of TikTokenizer, read into ranks and special tokens."""

import base64
import binascii
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.tokenizers.config import TokenizerConfig, named_ids
from megatron.core.tokenizers.files import parse_json, wrong_format
from megatron.core.utils import UserError

KIND = "TikTokenizer"
FLAG = "--tokenizer-model"
EXPECTED = "a tekken JSON or a tiktoken rank file"
# Megatron's defaults for a JSON that does not say: names of the first special ids, and total size.
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
VOCAB_SIZE = 2**17
END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """What tiktoken needs of a file."""

    tokens: dict[bytes, int]
    special: dict[str, int]
    pattern: str | None
    """How text is split, where the file says so."""


def read_ranks(data: bytes, path: str | Path, config: TokenizerConfig) -> Ranks:
    """Return the ranks of a file of either format, special tokens placed.

    Raises:
        UserError: the file is of neither format, or the flags do not fit it.
    """
    is_json = data.lstrip()[:1] in (b"[", b"{")
    ranks = _tekken(data, path, config) if is_json else _rank_file(data, path, config)
    missing = [i for i in range(256) if bytes([i]) not in ranks.tokens]
    if missing:
        raise wrong_format(
            path,
            FLAG,
            EXPECTED,
            f"{len(missing)} of the 256 bytes are no tokens, such as 0x{missing[0]:02x}, so not "
            "every text could be encoded",
        )
    return ranks


def _tekken(data: bytes, path: str | Path, config: TokenizerConfig) -> Ranks:
    """Read a tekken JSON: special tokens first, then tokens in order of rank."""
    content = parse_json(data, path, FLAG, EXPECTED)
    settings: dict[str, Any] = {}
    own_special: list[Any] = []
    if isinstance(content, dict):
        settings = content.get("config") or {}
        own_special = content.get("special_tokens") or []
        content = content.get("vocab")
    if not isinstance(content, list):
        raise wrong_format(
            path,
            FLAG,
            EXPECTED,
            "the JSON has no list of tokens; a tokenizer.json needs --tokenizer-type "
            "HuggingFaceTokenizer",
        )
    count = int(settings.get("default_num_special_tokens", config.tiktoken_num_special_tokens))
    names = config.tokenizer_special_tokens
    if names is None:
        # Mistral's older files have tokens of their own in the places of <mask> and <pad>.
        usual = SPECIAL_TOKENS[:3] if settings else SPECIAL_TOKENS
        names = _names_of(own_special, path) or usual[:count]
    if len(names) > count:
        raise UserError(
            f"--tokenizer-special-tokens gives {len(names)} names, but the vocabulary has "
            f"{count} special ids; raise --tiktoken-num-special-tokens"
        )
    filler = [f"<SPECIAL_{i}>" for i in range(len(names), count)]
    special = {name: i for i, name in enumerate([*names, *filler])}
    size = config.vocab_size or int(settings.get("default_vocab_size", VOCAB_SIZE))
    if size <= count:
        raise UserError(
            f"--vocab-size ({size}) counts the special tokens too and must exceed their number "
            f"({count}, --tiktoken-num-special-tokens)"
        )
    tokens: dict[bytes, int] = {}
    for rank, entry in enumerate(content[: size - count]):
        tokens[_token_of(entry, rank, path)] = rank + count
    if len(tokens) < min(len(content), size - count):
        raise wrong_format(path, FLAG, EXPECTED, "a token stands in it twice")
    return Ranks(tokens=tokens, special=special, pattern=settings.get("pattern", "v2"))


def _names_of(entries: list[Any], path: str | Path) -> tuple[str, ...]:
    """Return the names of a tekken file's own special tokens, which must be numbered from 0."""
    names = []
    for rank, entry in enumerate(entries):
        if not isinstance(entry, dict) or entry.get("rank") != rank or "token_str" not in entry:
            raise wrong_format(path, FLAG, EXPECTED, f"special token {rank} is {entry!r:.80}")
        names.append(str(entry["token_str"]))
    return tuple(names)


def _token_of(entry: Any, rank: int, path: str | Path) -> bytes:
    try:
        if entry["rank"] != rank:
            raise ValueError(f"its rank should be {rank}")
        return base64.b64decode(entry["token_bytes"], validate=True)
    except (KeyError, TypeError, ValueError) as error:
        why = f"entry {rank} is {entry!r:.80} ({error})"
        raise wrong_format(path, FLAG, EXPECTED, why) from None


def _rank_file(data: bytes, path: str | Path, config: TokenizerConfig) -> Ranks:
    """Read a rank file: tokens keep their ids, special tokens come after them."""
    tokens: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            tokens[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            why = f"line {number} is not a base64 token and a rank: {line[:60]!r}"
            raise wrong_format(path, FLAG, EXPECTED, why) from None
    if len(set(tokens.values())) < len(tokens):
        raise wrong_format(path, FLAG, EXPECTED, "a rank stands in it twice")
    names = named_ids(config.tokenizer_special_tokens or (END_OF_TEXT,))
    if config.vocab_size is not None:
        unnumbered = sum(i is None for _, i in names)
        keep = config.vocab_size - unnumbered
        tokens = {token: rank for token, rank in tokens.items() if rank < keep}
    free = 1 + max(tokens.values(), default=-1)
    taken = set(tokens.values())
    special: dict[str, int] = {}
    for name, i in names:
        special[name] = free if i is None else i
        if special[name] in taken:
            raise UserError(
                f"--tokenizer-special-tokens {name}={special[name]}: that id is taken; the first "
                f"free one is {1 + max(taken)}"
            )
        taken.add(special[name])
        free = max(free, special[name] + 1)
    return Ranks(tokens=tokens, special=special, pattern=None)
