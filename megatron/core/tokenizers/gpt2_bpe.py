"""GPT2BPETokenizer: byte-level BPE from GPT-2's pair of files (Radford et al., 2019).

``vocab.json`` maps tokens to ids, ``merges.txt`` lists pairs in the order in which they are joined.
Tokens are spelled in an alphabet of 256 printable characters, one for each byte, so every text has
ids. ``<|endoftext|>`` ends a document.
"""

from typing import Any

from megatron.core.tokenizers.base import SpecialIds
from megatron.core.tokenizers.config import TokenizerConfig
from megatron.core.tokenizers.files import (
    import_library,
    parse_json,
    parse_text,
    read_file,
    require,
    wrong_format,
)
from megatron.core.tokenizers.library import (
    BPE_CACHE_WORDS,
    LibraryTokenizer,
    add_sentinels,
    add_special_tokens,
)

KIND = "GPT2BPETokenizer"
END_OF_TEXT = "<|endoftext|>"
VOCAB = "GPT-2's vocab.json, an object of token: id"
MERGES = "GPT-2's merges.txt, a pair of tokens per line"


def load(config: TokenizerConfig) -> LibraryTokenizer:
    """Return the tokenizer of ``--vocab-file`` and ``--merge-file``."""
    vocab_file = require(config.vocab_file, KIND, "--vocab-file", VOCAB)
    merge_file = require(config.merge_file, KIND, "--merge-file", MERGES)
    vocab_data = read_file(vocab_file, "--vocab-file", VOCAB)
    merge_data = read_file(merge_file, "--merge-file", MERGES)
    vocab = _vocab(vocab_data, vocab_file)
    merges = _merges(merge_data, merge_file)
    library = import_library("tokenizers", KIND)
    _check_alphabet(library, vocab, vocab_file)
    try:
        model = library.models.BPE(vocab, merges, cache_capacity=BPE_CACHE_WORDS)
    except Exception as error:  # the library raises no narrower class
        raise wrong_format(
            merge_file, "--merge-file", f"the merges of --vocab-file {vocab_file}", str(error)
        ) from None
    tokenizer = library.Tokenizer(model)
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    added = list(config.tokenizer_special_tokens or ())
    add_special_tokens(tokenizer, added)
    sentinels = add_sentinels(tokenizer, config.vocab_extra_ids)
    end = tokenizer.token_to_id(END_OF_TEXT)
    return LibraryTokenizer(
        tokenizer,
        kind=KIND,
        special=SpecialIds(
            eod=end,
            bos=end,
            eos=end,
            pad=tokenizer.token_to_id("<|padding|>"),
            sentinels=sentinels.ids,
        ),
        contents=[vocab_data, merge_data],
        options={"kind": KIND, "added": added},
        sentinels=sentinels,
    )


def _vocab(data: bytes, path: str) -> dict[str, int]:
    vocab = parse_json(data, path, "--vocab-file", VOCAB)
    if not isinstance(vocab, dict):
        raise wrong_format(path, "--vocab-file", VOCAB, f"it holds a {type(vocab).__name__}")
    if "model" in vocab and isinstance(vocab["model"], dict):
        raise wrong_format(
            path,
            "--vocab-file",
            VOCAB,
            "it is a tokenizer.json; use --tokenizer-type HuggingFaceTokenizer --tokenizer-model",
        )
    for token, i in vocab.items():
        if isinstance(i, bool) or not isinstance(i, int) or i < 0:
            raise wrong_format(path, "--vocab-file", VOCAB, f"{token!r} has the id {i!r}")
    return vocab


def _merges(data: bytes, path: str) -> list[tuple[str, str]]:
    text = parse_text(data, path, "--merge-file", MERGES)
    merges = []
    # Only "\n" ends a line: other separators, such as U+0085, can be letters of a token.
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.removesuffix("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        if len(pair) != 2:
            raise wrong_format(
                path, "--merge-file", MERGES, f"line {number} is not a pair: {line[:60]!r}"
            )
        merges.append((pair[0], pair[1]))
    return merges


def _check_alphabet(library: Any, vocab: dict[str, int], path: str) -> None:
    """A letter without an id would be dropped from texts without a word."""
    missing = sorted(set(library.pre_tokenizers.ByteLevel.alphabet()) - set(vocab))
    if missing:
        raise wrong_format(
            path,
            "--vocab-file",
            VOCAB,
            f"{len(missing)} of the 256 letters that stand for bytes have no id, "
            f"such as {missing[0]!r}",
        )
