"""NullTokenizer: the text is ids already, decimal and separated by white space.

For made-up data and for data whose ids come from elsewhere. ``--vocab-size`` ids, and one more that
ends a document unless ``--null-tokenizer-eod-id`` names one of them.
"""

from megatron.core.tokenizers.base import SpecialIds, Tokenizer
from megatron.core.tokenizers.config import TokenizerConfig
from megatron.core.utils import UserError

KIND = "NullTokenizer"


class NullTokenizer(Tokenizer):
    """Ids as text.

    Args:
        size: ids without that of the end of a document.
        eod: end-of-document id.
        pad: padding id, or None.
    """

    family = "null"

    def __init__(self, size: int, eod: int, pad: int | None = None) -> None:
        super().__init__(
            kind=KIND,
            vocab_size=max(size, eod + 1),
            special=SpecialIds(eod=eod, eos=eod, pad=pad),
        )

    def token_id(self, token: str) -> int | None:
        i = int(token) if token.isdecimal() else -1
        return i if 0 <= i < self.vocab_size else None

    def _encode(self, text: str) -> list[int]:
        ids = []
        for word in text.split():
            i = self.token_id(word)
            if i is None:
                raise UserError(
                    f"NullTokenizer reads ids from 0 to {self.vocab_size - 1} separated by spaces, "
                    f"not {word[:60]!r}; for text choose another --tokenizer-type, for larger ids "
                    "raise --vocab-size"
                )
            ids.append(i)
        return ids

    def _decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def load(config: TokenizerConfig) -> NullTokenizer:
    """Return the tokenizer of ``--vocab-size`` ids."""
    size = config.vocab_size
    if size is None:
        raise UserError(f"--tokenizer-type {KIND} needs --vocab-size: how many ids there are")
    eod = size if config.null_tokenizer_eod_id is None else config.null_tokenizer_eod_id
    if not 0 <= eod <= size:
        raise UserError(
            f"--null-tokenizer-eod-id ({eod}) must lie between 0 and --vocab-size ({size})"
        )
    pad = config.null_tokenizer_pad_id
    if pad > max(size - 1, eod):
        raise UserError(f"--null-tokenizer-pad-id ({pad}) must be below --vocab-size ({size})")
    return NullTokenizer(size, eod, None if pad < 0 else pad)
