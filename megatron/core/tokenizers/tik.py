"""TikTokenizer: byte-level BPE by ranks, run by tiktoken. Two file formats.

- A tekken JSON, Mistral's or a bare list of its entries: special tokens take the first
  ``--tiktoken-num-special-tokens`` ids, the file's tokens follow in order of rank.
- A rank file (``.tiktoken``): a base64 token and its id per line; special tokens follow.

How text is split before merging belongs to the vocabulary but stands in neither rank files nor bare
lists: ``--tiktoken-pattern``, v2 for a list as in Megatron.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megatron.core.tokenizers.base import Ids, SpecialIds, Tokenizer
from megatron.core.tokenizers.config import TokenizerConfig
from megatron.core.tokenizers.files import import_library, read_file, require, wrong_format
from megatron.core.tokenizers.tik_files import EXPECTED, FLAG, KIND, Ranks, read_ranks
from megatron.core.utils import UserError

# Patterns are part of a vocabulary: its ids depend on them. v1 and v2 are Megatron's, the others
# those of OpenAI's vocabularies; Llama 3 splits as cl100k.
_CONTRACTION = r"(?i:'(?:[sdmt]|ll|ve|re))"
_ENDS_LOWER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_STARTS_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": (
        rf"{_ENDS_LOWER}|{_STARTS_UPPER}"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k": (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "o200k": (
        rf"{_ENDS_LOWER}{_CONTRACTION}?|{_STARTS_UPPER}{_CONTRACTION}?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
ROLES = {
    "eos": ("</s>", "<|endoftext|>", "<|end_of_text|>"),
    "bos": ("<s>", "<|begin_of_text|>", "<|endoftext|>"),
    "pad": ("<pad>",),
    "mask": ("<mask>",),
    "cls": ("<cls>",),
    "sep": ("<sep>",),
}


class TikTokenizer(Tokenizer):
    """A ``tiktoken.Encoding``.

    Args:
        encoding: the library's encoding.
        special: special tokens and their ids.
        contents: bytes of the file.
        pattern: regular expression that splits text.
    """

    family = "tiktoken"

    def __init__(
        self, encoding: Any, special: Mapping[str, int], contents: bytes, pattern: str
    ) -> None:
        self._encoding = encoding
        self._special = dict(special)
        super().__init__(
            kind=KIND,
            vocab_size=encoding.n_vocab,
            special=_roles(special),
            contents=[contents],
            options={"pattern": pattern, "special": self._special},
        )

    def token_id(self, token: str) -> int | None:
        try:
            found: int = self._encoding.encode_single_token(token)
        except KeyError:
            return None
        return found

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._encoding.encode_ordinary(text)
        return ids

    def _encode_batch(self, texts: list[str], num_threads: int) -> list[Ids]:
        if num_threads == 1:
            return list(map(self._to_numpy, texts))
        with ThreadPoolExecutor(num_threads) as pool:
            return list(pool.map(self._to_numpy, texts))

    def _to_numpy(self, text: str) -> Ids:
        ids: Ids = self._encoding.encode_to_numpy(text, disallowed_special=())
        return ids

    def _decode(self, ids: list[int]) -> str:
        try:
            data: bytes = self._encoding.decode_bytes(ids)
        except KeyError:
            # A rank file can leave holes between its ids; they have no text.
            data = b"".join(map(self._bytes_of, ids))
        return data.decode("utf-8", errors="replace")

    def _bytes_of(self, i: int) -> bytes:
        try:
            data: bytes = self._encoding.decode_single_token_bytes(i)
        except KeyError:
            return b""
        return data


def load(config: TokenizerConfig) -> TikTokenizer:
    """Return the tokenizer of ``--tokenizer-model``."""
    path = require(config.tokenizer_model, KIND, FLAG, EXPECTED)
    data = read_file(path, FLAG, EXPECTED)
    library = import_library("tiktoken", KIND)
    ranks = read_ranks(data, path, config)
    pattern = _pattern(config, ranks, path)
    try:
        encoding = library.Encoding(
            name=KIND,
            pat_str=pattern,
            mergeable_ranks=ranks.tokens,
            special_tokens=ranks.special,
        )
        encoding.encode_ordinary("a b")
    except ValueError as error:
        # A bad expression is found by the library's own engine.
        raise wrong_format(
            pattern, "--tiktoken-pattern", "a regular expression", str(error)
        ) from None
    return TikTokenizer(encoding, ranks.special, data, pattern)


def _roles(special: Mapping[str, int]) -> SpecialIds:
    found = {
        role: next((special[name] for name in names if name in special), None)
        for role, names in ROLES.items()
    }
    return SpecialIds(
        eod=found["eos"],
        eos=found["eos"],
        bos=found["bos"],
        pad=found["pad"],
        mask=found["mask"],
        cls=found["cls"],
        sep=found["sep"],
    )


def _pattern(config: TokenizerConfig, ranks: Ranks, path: str) -> str:
    asked = config.tiktoken_pattern or ranks.pattern
    if asked is None:
        raise UserError(
            f"{FLAG} {path} is a rank file, which does not say how text is split before merging; "
            f"give the pattern it was made with as --tiktoken-pattern: {', '.join(PATTERNS)} or a "
            "regular expression"
        )
    return PATTERNS.get(asked, asked)
