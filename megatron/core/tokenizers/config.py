"""What a user says about the tokenizer and about the size of the vocabulary."""

import re
from collections.abc import Mapping
from typing import Any

from megatron.core.config import Config, check_at_least, check_at_most, option
from megatron.core.utils import UserError, nearest

MOST_ROWS = 2**31 - 1
"""Ids of a vocabulary, which are 32-bit numbers."""
LARGEST_MULTIPLE = 2**20
"""Of which a vocabulary may be made a multiple: larger ones are all padding."""
TOKENIZER_TYPES = (
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "GPT2BPETokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "HuggingFaceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "ByteLevelTokenizer",
    "NullTokenizer",
)

FORMER_NAMES = {
    "PretrainedFromHF": "HuggingFaceTokenizer",
    "HFAutoTokenizer": "HuggingFaceTokenizer",
    "TokenizerFromFile": "HuggingFaceTokenizer",
    "TokenizerFromFileWithFIM": "HuggingFaceTokenizer",
}


def tokenizer_type(name: str) -> str:
    """Return the type that ``name`` means.

    Raises:
        UserError: there is no such type.
    """
    if name in TOKENIZER_TYPES:
        return name
    if name in FORMER_NAMES:
        return FORMER_NAMES[name]
    by_lower_case = {known.lower(): known for known in TOKENIZER_TYPES}
    close = [by_lower_case[word] for word in nearest(name.lower(), by_lower_case)]
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise UserError(
        f"--tokenizer-type {name}: there is no such tokenizer; {hint}"
        f"the types are {', '.join(TOKENIZER_TYPES)}"
    )


class TokenizerConfig(Config):
    """How text becomes token ids, and how many rows the vocabulary has in the model."""

    tokenizer_type: str | None = option(
        derived="GPT2BPETokenizer with --vocab-file and --merge-file, "
        "BertWordPieceLowerCase with a --vocab-file alone that is no .json",
        parse=tokenizer_type,
        choices=TOKENIZER_TYPES,
    )
    """Kind of tokenizer."""

    vocab_file: str | None = option(None)
    """Vocabulary: vocab.json of GPT2BPETokenizer, vocab.txt of the BertWordPiece kinds."""

    merge_file: str | None = option(None)
    """Merges of GPT2BPETokenizer: merges.txt."""

    tokenizer_model: str | None = option(None)
    """Model of the other kinds: a sentencepiece .model, a tokenizer.json or the folder that holds
    one, a .tiktoken rank file or a tekken JSON."""

    vocab_size: int | None = option(None)
    """Size of the vocabulary before padding; when absent, the tokenizer's. For NullTokenizer the
    end-of-document id comes on top; for TikTokenizer it cuts the file's ranks, special tokens
    included."""

    padded_vocab_size: int | None = option(None)
    """Rows of the embedding after padding, instead of those that follow from
    --make-vocab-size-divisible-by."""

    make_vocab_size_divisible_by: int = option(128)
    """Round the vocabulary up to a multiple of this times --tensor-model-parallel-size."""

    pad_vocab_size: bool = option(True, aliases={"--disable-pad-vocab-size": False})
    """Pad the vocabulary; without it the size must divide by --tensor-model-parallel-size."""

    vocab_extra_ids: int = option(0)
    """Sentinel tokens <extra_id_0>, <extra_id_1>, ... that are added after the vocabulary; 0 takes
    those that it has."""

    tokenizer_special_tokens: tuple[str, ...] | None = option(
        None, aliases=("--tiktoken-special-tokens",)
    )
    """Special tokens by name. TikTokenizer: the first ids of a tekken JSON; for a rank file, the
    ids after the last rank, or NAME=ID. Other kinds: added after the vocabulary if not in it."""

    tiktoken_pattern: str | None = option(None)
    """How TikTokenizer splits text before merging: v1, v2, gpt2, cl100k (Llama 3 too), o200k or a
    regular expression. Default: what a tekken JSON says, else v2; a rank file needs it."""

    tiktoken_num_special_tokens: int = option(1000)
    """Special ids that come first in the vocabulary of a tekken JSON."""

    tokenizer_sentencepiece_legacy: bool = option(False)
    """Add special tokens behind the sentencepiece model: --tokenizer-special-tokens, or for
    SentencePieceTokenizer <CLS>, <SEP>, <EOD>, <MASK> and those of pad, bos, eos that it lacks."""

    null_tokenizer_eod_id: int | None = option(None)
    """End-of-document id of NullTokenizer; by default one more id, which is --vocab-size."""

    null_tokenizer_pad_id: int = option(-1)
    """Padding id of NullTokenizer; -1 for none."""

    @classmethod
    def derive(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Take two vocabulary files for GPT-2's and one for BERT's, as Megatron does."""
        vocab, merges = values["vocab_file"], values["merge_file"]
        if vocab and merges:
            return {"tokenizer_type": "GPT2BPETokenizer"}
        if vocab and not vocab.endswith(".json"):
            return {"tokenizer_type": "BertWordPieceLowerCase"}
        return {}

    def __post_init__(self) -> None:
        if self.tokenizer_type is not None and self.tokenizer_type not in TOKENIZER_TYPES:
            tokenizer_type(self.tokenizer_type)
        check_at_least(self, 1, "vocab_size", "padded_vocab_size", "make_vocab_size_divisible_by")
        check_at_most(self, MOST_ROWS, "vocab_size", "padded_vocab_size", "vocab_extra_ids")
        check_at_most(self, LARGEST_MULTIPLE, "make_vocab_size_divisible_by")
        check_at_least(self, 0, "vocab_extra_ids", "tiktoken_num_special_tokens")
        names = self.tokenizer_special_tokens or ()
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated or "" in names:
            what = f"repeats {', '.join(repeated)}" if repeated else "has an empty name"
            raise UserError(f"--tokenizer-special-tokens {what}; give each name once")
        if self.tiktoken_pattern is not None and not self.tiktoken_pattern.strip():
            raise UserError("--tiktoken-pattern is empty; give v1, v2 or a regular expression")


def named_ids(tokens: tuple[str, ...]) -> list[tuple[str, int | None]]:
    """Return (name, id) of special tokens written as NAME or NAME=ID; no id gives None."""
    found: list[tuple[str, int | None]] = []
    for token in tokens:
        match = re.fullmatch(r"(.+)=(\d+)", token, re.DOTALL)
        found.append((match[1], int(match[2])) if match else (token, None))
    return found
