"""BertWordPieceLowerCase and BertWordPieceCase: words cut into pieces (Devlin et al., 2018).

``vocab.txt`` has one piece per line, the line number being its id; ``##`` marks a piece that
continues a word. ``[BOS]`` and ``[EOS]`` are added after the vocabulary, then T5's sentinels.
"""

from megatron.core.tokenizers.base import SpecialIds
from megatron.core.tokenizers.config import TokenizerConfig
from megatron.core.tokenizers.files import (
    import_library,
    parse_text,
    read_file,
    require,
    wrong_format,
)
from megatron.core.tokenizers.library import LibraryTokenizer, add_sentinels, add_special_tokens

VOCAB = "BERT's vocab.txt, a piece per line"
REQUIRED = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ADDED = ("[BOS]", "[EOS]")


def load(config: TokenizerConfig) -> LibraryTokenizer:
    """Return the tokenizer of ``--vocab-file``; the type says whether case is dropped."""
    kind = str(config.tokenizer_type)
    lower_case = kind == "BertWordPieceLowerCase"
    path = require(config.vocab_file, kind, "--vocab-file", VOCAB)
    data = read_file(path, "--vocab-file", VOCAB)
    pieces = [piece.rstrip("\r") for piece in _text(data, path).split("\n")]
    if not pieces[-1]:
        pieces.pop()
    vocab = {piece: i for i, piece in enumerate(pieces)}
    missing = [name for name in REQUIRED if name not in vocab]
    if missing:
        raise wrong_format(path, "--vocab-file", VOCAB, f"no line is {', '.join(missing)}")
    library = import_library("tokenizers", kind)
    tokenizer = library.Tokenizer(library.models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = library.normalizers.BertNormalizer(lowercase=lower_case)
    tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = library.decoders.WordPiece(prefix="##")
    added = [*ADDED, *(config.tokenizer_special_tokens or ())]
    add_special_tokens(tokenizer, [*REQUIRED, *added])
    sentinels = add_sentinels(tokenizer, config.vocab_extra_ids)
    find = tokenizer.token_to_id
    return LibraryTokenizer(
        tokenizer,
        kind=kind,
        special=SpecialIds(
            eod=find("[EOS]"),
            pad=find("[PAD]"),
            bos=find("[BOS]"),
            eos=find("[EOS]"),
            cls=find("[CLS]"),
            sep=find("[SEP]"),
            mask=find("[MASK]"),
            sentinels=sentinels.ids,
        ),
        contents=[data],
        options={"kind": kind, "added": added},
        sentinels=sentinels,
    )


def _text(data: bytes, path: str) -> str:
    return parse_text(data, path, "--vocab-file", VOCAB)
