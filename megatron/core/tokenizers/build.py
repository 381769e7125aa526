"""From flags to a tokenizer: which file builds which kind."""

import importlib

from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.config import TOKENIZER_TYPES, TokenizerConfig, tokenizer_type
from megatron.core.utils import UserError

# A module is imported when its kind is asked for, and imports its library then.
MODULES = {
    "BertWordPieceLowerCase": "word_piece",
    "BertWordPieceCase": "word_piece",
    "GPT2BPETokenizer": "gpt2_bpe",
    "SentencePieceTokenizer": "sentence_piece",
    "GPTSentencePieceTokenizer": "sentence_piece",
    "HuggingFaceTokenizer": "hugging_face",
    "Llama2Tokenizer": "sentence_piece",
    "TikTokenizer": "tik",
    "ByteLevelTokenizer": "byte_level",
    "NullTokenizer": "null",
}


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Return the tokenizer that ``config`` describes, its files read.

    Raises:
        UserError: no type is given, a flag or file is missing or of the wrong kind, or the library
            that does the work is not installed.
    """
    if config.tokenizer_type is None:
        raise UserError(
            "--tokenizer-type is not given and does not follow from --vocab-file and --merge-file; "
            f"the types are {', '.join(TOKENIZER_TYPES)}"
        )
    module = importlib.import_module(
        f"megatron.core.tokenizers.{MODULES[tokenizer_type(config.tokenizer_type)]}"
    )
    tokenizer: Tokenizer = module.load(config)
    return tokenizer
