"""Tokenizers that the ``tokenizers`` library runs: GPT-2, BERT and every tokenizer.json.

The library's BPE remembers recent words, up to a fixed number of them. How many threads encode a
batch is a matter of the process, see `use_threads`.
"""

import json
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.core.tokenizers.base import Ids, SpecialIds, Tokenizer

BPE_CACHE_WORDS = 10_000


@dataclass(frozen=True)
class Sentinels:
    """<extra_id_0>, <extra_id_1>, ... of a vocabulary, as `add_sentinels` leaves them."""

    ids: tuple[int, ...]
    asked: int
    """As many as ``--vocab-extra-ids`` says."""
    added: int
    """New ids, the last of the vocabulary."""
    changed: tuple[str, ...]
    """Words of the vocabulary that became special, so that texts are no longer encoded to them."""


class LibraryTokenizer(Tokenizer):
    """A ``tokenizers.Tokenizer``, held to what `Tokenizer` promises.

    Truncation, padding and post-processing that the file asks for are left out: they would drop
    text or add tokens.
    """

    family = "tokenizers"

    def __init__(
        self,
        tokenizer: Any,
        *,
        kind: str,
        special: SpecialIds,
        contents: Sequence[bytes],
        options: Mapping[str, Any],
        sentinels: Sentinels,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        # Special tokens in a text are spelled out; other added tokens are words and still match.
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self._spelled = _spelled_out(tokenizer)
        super().__init__(
            kind=kind,
            vocab_size=full_size(tokenizer),
            special=special,
            contents=contents,
            options={**options, "extra_ids": list(sentinels.changed) or 0},
            added_sentinels=sentinels.added,
            sentinel_options={"extra_ids": sentinels.asked},
        )

    def token_id(self, token: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return self._without_special(ids)

    def _encode_batch(self, texts: list[str], num_threads: int) -> list[Ids]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [self._without_special(encoding.ids) for encoding in encodings]

    def continues_word(self) -> NDArray[np.bool_] | None:
        prefix = getattr(self._tokenizer.model, "continuing_subword_prefix", None)
        if not prefix:
            return None
        found = np.zeros(self.vocab_size, dtype=bool)
        for token, i in self._tokenizer.get_vocab(with_added_tokens=True).items():
            found[i] = token.startswith(prefix)
        return found

    def _without_special(self, ids: list[int]) -> list[int]:
        if not self._spelled or self._spelled.keys().isdisjoint(ids):
            return ids
        return [part for i in ids for part in self._spelled.get(i, (i,))]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text


def full_size(tokenizer: Any) -> int:
    """Return one more than the largest id, added tokens and holes included."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)


def add_special_tokens(tokenizer: Any, names: Sequence[str]) -> tuple[int, ...]:
    """Make ``names`` special tokens, with new ids for those not in the vocabulary; return ids."""
    tokenizer.add_special_tokens(list(names))
    return tuple(tokenizer.token_to_id(name) for name in names)


def add_sentinels(tokenizer: Any, count: int) -> Sentinels:
    """Return ``count`` sentinels, added where they are not in the vocabulary.

    With a count of 0, those that the vocabulary has.
    """
    if not count:
        return Sentinels(own_sentinels(tokenizer.token_to_id), asked=0, added=0, changed=())
    names = sentinel_names(count)
    before = full_size(tokenizer)
    special = {t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special}
    own = [name for name in names if tokenizer.token_to_id(name) is not None]
    changed = tuple(name for name in own if name not in special)
    ids = add_special_tokens(tokenizer, names)
    return Sentinels(ids, asked=count, added=full_size(tokenizer) - before, changed=changed)


def own_sentinels(token_id: Callable[[str], int | None]) -> tuple[int, ...]:
    """Return the ids of <extra_id_0>, <extra_id_1>, ... as far as a vocabulary has them."""
    ids: list[int] = []
    while (found := token_id(f"<extra_id_{len(ids)}>")) is not None:
        ids.append(found)
    return tuple(ids)


def _spelled_out(tokenizer: Any) -> dict[int, tuple[int, ...]]:
    """Return special id -> ids of its letters, for special tokens that the model itself can find.

    Unigram and word-level models have special tokens among their pieces, where text can match them
    although the library does not look for them. Most tokenizers have none of these.
    """
    special = {
        i: str(token.content)
        for i, token in tokenizer.get_added_tokens_decoder().items()
        if token.special and i in tokenizer.encode(token.content, add_special_tokens=False).ids
    }
    if not special:
        return {}
    model = json.loads(tokenizer.to_str())["model"]
    # Unknown words have this id for a good reason.
    unknown = model.get("unk_id", tokenizer.token_to_id(model.get("unk_token") or ""))
    special.pop(unknown, None)
    tokenize = tokenizer.model.tokenize
    return {
        i: tuple(token.id for part in (name[:1], name[1:]) for token in tokenize(part))
        for i, name in special.items()
    }


def sentinel_names(count: int) -> list[str]:
    """Return the names of T5's sentinel tokens."""
    return [f"<extra_id_{i}>" for i in range(count)]


def use_threads(environ: MutableMapping[str, str], count: int) -> dict[str, str]:
    """Let the library encode a batch with ``count`` threads, and return what was set for that.

    It takes both settings from environment variables alone: at every call whether it uses threads,
    and at the first such call how many. So an entry point gives its ``os.environ`` once, before it
    encodes; without that a batch takes all cores. What the user has set stays.
    """
    wanted = {"TOKENIZERS_PARALLELISM": "true" if count > 1 else "false"}
    if count > 1:
        wanted["RAYON_NUM_THREADS"] = str(count)
    ours = {name: value for name, value in wanted.items() if name not in environ}
    environ.update(ours)
    return ours
