"""What every tokenizer can do: text to ids, ids to text, and say who it is.

Encoding never adds a special token by itself, and text never becomes one: a user's
``<|endoftext|>`` is spelled out in ordinary ids. Whoever wants an end of document appends ``eod``.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from megatron.core.utils import UserError

Ids = Sequence[int] | NDArray[np.integer[Any]]


@dataclass(frozen=True, kw_only=True)
class SpecialIds:
    """Ids with a meaning of their own; None where the vocabulary has no such token."""

    eod: int | None = None
    """End of document."""
    pad: int | None = None
    bos: int | None = None
    eos: int | None = None
    cls: int | None = None
    sep: int | None = None
    mask: int | None = None
    sentinels: tuple[int, ...] = ()
    """<extra_id_0>, <extra_id_1>, ... in order: added, or the vocabulary's own."""


class Tokenizer(ABC):
    """A tokenizer of one kind, loaded.

    Args:
        kind: name of its ``--tokenizer-type``, for messages.
        vocab_size: one more than the largest id, added tokens included.
        special: ids with a meaning.
        contents: bytes of the files that it was loaded from.
        options: whatever else decides the ids of a text.
        added_sentinels: how many of the last ids are sentinels, which no text is encoded to.
        sentinel_options: what ``options`` are with them, by name.
    """

    family: ClassVar[str]
    """What the fingerprint calls the class: data files hold it, so it must not change."""

    def __init__(
        self,
        *,
        kind: str,
        vocab_size: int,
        special: SpecialIds,
        contents: Sequence[bytes] = (),
        options: Mapping[str, Any] | None = None,
        added_sentinels: int = 0,
        sentinel_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.kind = kind
        self.vocab_size = vocab_size
        self.special = special
        identity = {
            "family": self.family,
            "vocab_size": vocab_size - added_sentinels,
            "eod": special.eod,
            "files": [hashlib.sha256(data).hexdigest() for data in contents],
            "options": dict(options or {}),
        }
        self._without_sentinels = _digest(identity)
        all_options = {**(options or {}), **(sentinel_options or {})}
        self._fingerprint = _digest(identity | {"vocab_size": vocab_size, "options": all_options})

    @property
    def eod(self) -> int | None:
        """Id that ends a document; None when the vocabulary has none."""
        return self.special.eod

    @property
    def pad(self) -> int | None:
        """Id that fills up a sequence; None when the vocabulary has none."""
        return self.special.pad

    @property
    def bos(self) -> int | None:
        """Id that begins a sequence; None when the vocabulary has none."""
        return self.special.bos

    @property
    def eos(self) -> int | None:
        """Id that ends a sequence; None when the vocabulary has none."""
        return self.special.eos

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``, and no others.

        Raises:
            UserError: ``text`` is not valid Unicode.
        """
        _check_text(text)
        return self._encode(text)

    def encode_batch(self, texts: Sequence[str], num_threads: int = 1) -> list[Ids]:
        """Return the ids of each text, as `encode` does, by the library's quickest way.

        Args:
            texts: valid Unicode.
            num_threads: threads that encode, for the libraries that can be told so; that of Hugging
                Face cannot, see `library.use_threads`.
        """
        for text in texts:
            _check_text(text)
        return self._encode_batch(list(texts), num_threads)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ``ids``, special tokens by name.

        Bytes that make no character, as in a sequence cut short, become U+FFFD.

        Raises:
            UserError: an id is not in the vocabulary.
        """
        plain = [int(i) for i in ids]
        for position, i in enumerate(plain):
            if not 0 <= i < self.vocab_size:
                raise UserError(
                    f"id {i} at position {position} is out of range: {self.kind} has ids 0 to "
                    f"{self.vocab_size - 1}; was the data made with another tokenizer?"
                )
        return self._decode(plain)

    def continues_word(self) -> NDArray[np.bool_] | None:
        """Return, for each id, whether it goes on with a word, as WordPiece's ``##ing`` does.

        None where the vocabulary does not say.
        """
        return None

    @abstractmethod
    def token_id(self, token: str) -> int | None:
        """Return the id of one token by its name, or None."""

    @abstractmethod
    def _encode(self, text: str) -> list[int]: ...

    def _encode_batch(self, texts: list[str], num_threads: int) -> list[Ids]:
        return [self._encode(text) for text in texts]

    @abstractmethod
    def _decode(self, ids: list[int]) -> str: ...

    def fingerprint(self) -> str:
        """Return a hash that is equal for tokenizers that give equal ids, wherever they lie.

        It covers file contents and options, not paths, so that data can say what made it.
        """
        return self._fingerprint

    def without_sentinels(self) -> str:
        """Return the fingerprint that the tokenizer has without the sentinels added to it.

        It is equal for tokenizers that give texts equal ids and differ in sentinels alone.
        """
        return self._without_sentinels

    @property
    def unique_identifiers(self) -> dict[str, str]:
        """What tells this tokenizer from another in the names of cached indices."""
        name = f"{type(self).__module__}.{type(self).__qualname__}"
        return {"class": name, "fingerprint": self._fingerprint}


def _digest(identity: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _check_text(text: str) -> None:
    """Refuse what no encoding can hold; an escape in a JSON string can produce it."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"character {error.start} of the text is {text[error.start]!r}, half of a surrogate "
            "pair, which is no valid Unicode; repair or drop the text"
        ) from None
