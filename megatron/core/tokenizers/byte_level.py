"""ByteLevelTokenizer: a byte of UTF-8 is an id, special tokens follow from 256 on.

It needs no file. By default two special tokens, ``<eod>`` (256) and ``<pad>`` (257).
"""

import numpy as np

from megatron.core.tokenizers.base import Ids, SpecialIds, Tokenizer
from megatron.core.tokenizers.config import TokenizerConfig
from megatron.core.tokenizers.library import sentinel_names

KIND = "ByteLevelTokenizer"
SPECIAL_TOKENS = ("<eod>", "<pad>")
BYTES = 256


class ByteLevelTokenizer(Tokenizer):
    """Bytes and named special tokens, the first of which ends a document."""

    family = "bytes"

    def __init__(self, names: tuple[str, ...], sentinels: int = 0) -> None:
        extra = sentinel_names(sentinels)
        self._names = [*names, *extra]
        ids = {name: BYTES + i for i, name in enumerate(self._names)}
        end = ids[names[0]] if names else None
        super().__init__(
            kind=KIND,
            vocab_size=BYTES + len(self._names),
            special=SpecialIds(
                eod=end,
                eos=end,
                pad=ids.get("<pad>"),
                bos=ids.get("<bos>"),
                sentinels=tuple(ids[name] for name in extra),
            ),
            options={"special": list(names)},
            added_sentinels=len(extra),
            sentinel_options={"special": self._names},
        )

    def token_id(self, token: str) -> int | None:
        if token in self._names:
            return BYTES + self._names.index(token)
        data = token.encode()
        return data[0] if len(data) == 1 else None

    def _encode(self, text: str) -> list[int]:
        return list(text.encode())

    def _encode_batch(self, texts: list[str], num_threads: int) -> list[Ids]:
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def _decode(self, ids: list[int]) -> str:
        data = b"".join(bytes([i]) if i < BYTES else self._names[i - BYTES].encode() for i in ids)
        return data.decode("utf-8", errors="replace")


def load(config: TokenizerConfig) -> ByteLevelTokenizer:
    """Return the byte tokenizer with ``--tokenizer-special-tokens``."""
    names = config.tokenizer_special_tokens
    return ByteLevelTokenizer(SPECIAL_TOKENS if names is None else names, config.vocab_extra_ids)
