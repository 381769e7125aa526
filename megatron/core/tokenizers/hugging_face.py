"""HuggingFaceTokenizer: a ``tokenizer.json``, or the folder that holds one. Never the network.

``tokenizer.json`` says how text becomes ids; which token ends a document or fills up a sequence
stands in ``tokenizer_config.json`` or ``special_tokens_map.json`` beside it.
"""

from pathlib import Path
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
from megatron.core.tokenizers.library import LibraryTokenizer, add_sentinels, add_special_tokens

KIND = "HuggingFaceTokenizer"
FLAG = "--tokenizer-model"
EXPECTED = "a tokenizer.json or the folder that holds one"
ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
# The first source that names a token wins.
SOURCES = ("tokenizer_config.json", "special_tokens_map.json")
# What ends a document when no file says so but exactly one of these is a special token.
USUAL_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[EOS]")


def load(config: TokenizerConfig) -> LibraryTokenizer:
    """Return the tokenizer of ``--tokenizer-model``."""
    path = _find(require(config.tokenizer_model, KIND, FLAG, EXPECTED))
    data = read_file(path, FLAG, EXPECTED)
    tokenizer = _parse(data, path)
    names = _special_names(path)
    asked = [*names.values(), *(config.tokenizer_special_tokens or ())]
    added = [name for name in asked if tokenizer.token_to_id(name) is None]
    add_special_tokens(tokenizer, asked)
    sentinels = add_sentinels(tokenizer, config.vocab_extra_ids)
    if "eos" not in names:
        names.update(_usual_end(tokenizer))
    ids = {role: tokenizer.token_to_id(name) for role, name in names.items()}
    return LibraryTokenizer(
        tokenizer,
        kind=KIND,
        special=SpecialIds(
            eod=ids.get("eos"),
            **{role: i for role, i in ids.items() if role != "unk"},
            sentinels=sentinels.ids,
        ),
        contents=[data],
        options={"kind": KIND, "added": added},
        sentinels=sentinels,
    )


def _find(model: str) -> Path:
    """Return the tokenizer.json that ``--tokenizer-model`` means."""
    path = Path(model)
    if path.is_file():
        return path
    if (path / "tokenizer.json").exists():
        return path / "tokenizer.json"
    if not path.exists():
        why = "no such file or folder"
        if model.count("/") <= 1 and not path.suffix:
            why += "; a name on a model hub must be downloaded first, nothing is fetched here"
    elif (path / "tokenizer.model").exists():
        why = (
            "the folder has no tokenizer.json but a tokenizer.model; use --tokenizer-type "
            f"Llama2Tokenizer {FLAG} {path / 'tokenizer.model'}"
        )
    elif (path / "vocab.json").exists() and (path / "merges.txt").exists():
        why = (
            "the folder has no tokenizer.json but GPT-2's pair of files; use --tokenizer-type "
            f"GPT2BPETokenizer --vocab-file {path / 'vocab.json'} "
            f"--merge-file {path / 'merges.txt'}"
        )
    else:
        why = "the folder has no tokenizer.json"
    raise wrong_format(model, FLAG, EXPECTED, why)


def _parse(data: bytes, path: Path) -> Any:
    text = parse_text(data, path, FLAG, EXPECTED)
    library = import_library("tokenizers", KIND)
    try:
        return library.Tokenizer.from_str(text)
    except Exception as error:  # the library raises no narrower class
        why = f"tokenizers {library.__version__} says: {error}"
        raise wrong_format(path, FLAG, EXPECTED, why) from None


def _special_names(path: Path) -> dict[str, str]:
    """Return role -> token from the files beside a tokenizer.json."""
    names: dict[str, str] = {}
    for source in SOURCES:
        beside = path.parent / source
        if path.name != "tokenizer.json" or not beside.exists():
            continue
        table = parse_json(read_file(beside, FLAG, source), beside, FLAG, "an object of settings")
        if not isinstance(table, dict):
            raise wrong_format(beside, FLAG, "an object of settings", f"it holds {table!r:.60}")
        for role in ROLES:
            token = table.get(f"{role}_token")
            # Either the token itself or an object that describes it.
            name = token.get("content") if isinstance(token, dict) else token
            if isinstance(name, str) and name:
                names.setdefault(role, name)
    return names


def _usual_end(tokenizer: Any) -> dict[str, str]:
    special = {str(t.content) for t in tokenizer.get_added_tokens_decoder().values() if t.special}
    ends = [name for name in USUAL_ENDS if name in special]
    return {"eos": ends[0]} if len(ends) == 1 else {}
