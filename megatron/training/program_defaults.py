"""What an entry point has of its own for what nobody gave, as Megatron-LM's have."""

from collections.abc import Mapping
from typing import Any

from megatron.core.config import Origin
from megatron.core.utils import UserError
from megatron.training.model_rules import ENCODER_DECODER

WORD_PIECES = "BertWordPieceLowerCase"
PROGRAM_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "pretrain_gpt": {"tokenizer_type": "GPT2BPETokenizer"},
    "pretrain_bert": {"tokenizer_type": WORD_PIECES, "masked_words": True},
    ENCODER_DECODER: {"tokenizer_type": WORD_PIECES},
}


def take_defaults(values: dict[str, Any], origins: dict[str, Origin], program: str) -> None:
    """Add what an entry point has of its own for what nobody gave.

    Raises:
        UserError: the tokenizer's files are not those of the type that nobody named.
    """
    for name, value in PROGRAM_DEFAULTS.get(program, {}).items():
        if values.get(name) is None and not (value == WORD_PIECES and _has_a_pair(values, program)):
            values[name] = value
            origins.setdefault(name, "default")


def _has_a_pair(values: Mapping[str, Any], program: str) -> bool:
    """Return whether files say that the tokenizer is GPT-2's, not one of word pieces.

    Raises:
        UserError: they are of neither.
    """
    vocabulary, merges = values.get("vocab_file"), values.get("merge_file")
    model = values.get("tokenizer_model")
    if vocabulary and merges:
        return True
    if vocabulary and vocabulary.endswith(".json"):
        raise UserError(
            f"--vocab-file {vocabulary} alone: {program}.py takes it for {WORD_PIECES}, whose "
            "vocabulary is a text file with a piece per line (vocab.txt); give --merge-file "
            "merges.txt beside GPT-2's vocab.json, or for a tokenizer.json --tokenizer-type "
            f"HuggingFaceTokenizer --tokenizer-model {vocabulary}"
        )
    if model and not vocabulary:
        raise UserError(
            f"--tokenizer-model {model} without --tokenizer-type: {program}.py takes "
            f"{WORD_PIECES} then, which reads --vocab-file vocab.txt; give --tokenizer-type "
            "SentencePieceTokenizer for a sentencepiece model, HuggingFaceTokenizer for a "
            "tokenizer.json"
        )
    return False
