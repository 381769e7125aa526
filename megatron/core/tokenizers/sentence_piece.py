"""SentencePieceTokenizer, GPTSentencePieceTokenizer and Llama2Tokenizer: a sentencepiece model.

The model brings its own special tokens; ``</s>`` ends a document. With
``--tokenizer-sentencepiece-legacy`` tokens are added behind the model's pieces, as older data has
them: for SentencePieceTokenizer ``<CLS> <SEP> <EOD> <MASK>``, then whichever of pad, bos and eos
the model lacks, and ``<EOD>`` ends a document.
"""

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from megatron.core.tokenizers.base import Ids, SpecialIds, Tokenizer
from megatron.core.tokenizers.config import TokenizerConfig
from megatron.core.tokenizers.files import import_library, read_file, require, wrong_format
from megatron.core.tokenizers.library import own_sentinels, sentinel_names
from megatron.core.utils import UserError

FLAG = "--tokenizer-model"
EXPECTED = "a sentencepiece .model file"
LEGACY = ("<CLS>", "<SEP>", "<EOD>", "<MASK>")


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model and the tokens added behind it.

    Args:
        processor: the library's ``SentencePieceProcessor``.
        kind: name of its ``--tokenizer-type``.
        added: names of the tokens behind the pieces, in the order of their ids.
        sentinels: how many ``<extra_id_i>`` come last.
        contents: bytes of the model file.
    """

    family = "sentencepiece"

    def __init__(
        self, processor: Any, *, kind: str, added: list[str], sentinels: int, contents: bytes
    ) -> None:
        self._processor = processor
        self._pieces: int = processor.get_piece_size()
        extra = sentinel_names(sentinels)
        plain = [name for name in added if self._piece(name) is None]
        marks = [name for name in extra if self._piece(name) is None]
        names = [*plain, *marks]
        self._added = {name: self._pieces + i for i, name in enumerate(names)}
        self._added_names = {i: name for name, i in self._added.items()}
        # Arrays spare the library a Python number per token; older versions have none.
        self._out_type = "numpy" if hasattr(processor, "encode_as_numpy") else int
        super().__init__(
            kind=kind,
            vocab_size=self._pieces + len(names),
            special=self._special("<EOD>" in added, sentinels),
            contents=[contents],
            options={"added": plain},
            added_sentinels=len(marks),
            sentinel_options={"added": names},
        )

    def _special(self, has_eod: bool, sentinels: int) -> SpecialIds:
        own = {
            "pad": self._processor.pad_id(),
            "bos": self._processor.bos_id(),
            "eos": self._processor.eos_id(),
        }
        # The library gives -1 for a token that the model lacks.
        ids = {
            role: i if i >= 0 else self._added.get(f"<{role.upper()}>") for role, i in own.items()
        }
        return SpecialIds(
            eod=self.token_id("<EOD>") if has_eod else ids["eos"],
            pad=ids["pad"],
            bos=ids["bos"],
            eos=ids["eos"],
            cls=self.token_id("<CLS>"),
            sep=self.token_id("<SEP>"),
            mask=self.token_id("<MASK>"),
            sentinels=own_sentinels(self.token_id)[: sentinels or None],
        )

    def token_id(self, token: str) -> int | None:
        return self._added.get(token, self._piece(token))

    def _piece(self, token: str) -> int | None:
        i: int = self._processor.piece_to_id(token)
        # An unknown piece gets the id of the unknown token.
        return i if self._processor.id_to_piece(i) == token else None

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._processor.encode(text, out_type=int)
        return ids

    def _encode_batch(self, texts: list[str], num_threads: int) -> list[Ids]:
        ids: list[Ids] = self._processor.encode(
            texts, out_type=self._out_type, num_threads=num_threads
        )
        return ids

    def _decode(self, ids: list[int]) -> str:
        parts: Iterable[str] = (
            " ".join(self._added_names[i] for i in run)
            if is_added
            else self._processor.decode(list(run))
            for is_added, run in groupby(ids, key=lambda i: i >= self._pieces)
        )
        return " ".join(parts)


def load(config: TokenizerConfig) -> SentencePieceTokenizer:
    """Return the tokenizer of ``--tokenizer-model``."""
    kind = str(config.tokenizer_type)
    path = require(config.tokenizer_model, kind, FLAG, EXPECTED)
    data = read_file(path, FLAG, EXPECTED)
    library = import_library("sentencepiece", kind)
    try:
        processor = library.SentencePieceProcessor(model_proto=data)
    except (RuntimeError, OSError):
        why = "sentencepiece cannot parse it" + _hint(data)
        raise wrong_format(path, FLAG, EXPECTED, why) from None
    if not processor.get_piece_size():
        raise wrong_format(path, FLAG, EXPECTED, "it has no pieces")
    return SentencePieceTokenizer(
        processor,
        kind=kind,
        added=_added(config, kind, processor),
        sentinels=config.vocab_extra_ids,
        contents=data,
    )


def _added(config: TokenizerConfig, kind: str, processor: Any) -> list[str]:
    """Return the names of tokens to add behind the model."""
    asked = list(config.tokenizer_special_tokens or ())
    if not config.tokenizer_sentencepiece_legacy:
        if asked:
            raise UserError(
                f"--tokenizer-special-tokens with {kind}: a sentencepiece model has its special "
                "tokens from training; to add some behind it, give --tokenizer-sentencepiece-legacy"
            )
        return []
    if asked or kind != "SentencePieceTokenizer":
        return asked
    own = {"<PAD>": processor.pad_id(), "<BOS>": processor.bos_id(), "<EOS>": processor.eos_id()}
    return [*LEGACY, *(name for name, i in own.items() if i < 0)]


def _hint(data: bytes) -> str:
    start = data.lstrip()[:1]
    if start == b"{":
        return "; a tokenizer.json needs --tokenizer-type HuggingFaceTokenizer"
    first = data.split(b"\n", 1)[0].split(b" ")
    if len(first) == 2 and first[1].strip().isdigit():
        return "; a tiktoken rank file needs --tokenizer-type TikTokenizer"
    return ""
