"""Train a byte-level BPE tokenizer on text and write it as a folder for HuggingFaceTokenizer.

    python tools/train_tokenizer.py --input data/shakespeare.jsonl --vocab-size 4096 --output data

writes data/tokenizer.json and data/tokenizer_config.json. Inputs are those of preprocess_data.py:
JSON lines, plain text or Parquet, compressed or not. The same input gives the same files.
"""

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

if __name__ == "__main__":  # run from a clone, without installing
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.config import Config, option
from megatron.core.datasets.preprocess.reading import read_blocks
from megatron.core.datasets.preprocess.records import Parser, Problem
from megatron.core.datasets.preprocess.sources import Source, find_sources, whole
from megatron.core.tokenizers.files import import_library
from megatron.core.utils import UserError, atomic_path, check_folder
from megatron.training.arguments import parse_tool, run_main

PROGRAM = "train_tokenizer"
BYTES = 256
# What an encoder-decoder or an encoder needs: its first token, its padding and BERT's marks.
ROLES = {
    "<pad>": "pad_token",
    "[PAD]": "pad_token",
    "<s>": "bos_token",
    "<bos>": "bos_token",
    "[BOS]": "bos_token",
    "[CLS]": "cls_token",
    "[SEP]": "sep_token",
    "[MASK]": "mask_token",
}


class TrainConfig(Config):
    """What the tokenizer is trained on, and how large it becomes."""

    input: tuple[str, ...] = option()
    """Files, folders or globs: JSON lines, plain text or Parquet, also compressed."""

    output: str = option()
    """Folder for tokenizer.json and tokenizer_config.json."""

    vocab_size: int = option()
    """Ids in all: 256 bytes, special tokens and merges."""

    json_keys: tuple[str, ...] = option(("text",), aliases=("--json-key",))
    """Keys (columns of Parquet) that hold text."""

    input_format: Literal["auto", "jsonl", "txt", "parquet"] = option("auto")
    """Format of every input; auto goes by the file's ending."""

    end_token: str = option("<|endoftext|>")
    """Token that ends a document; it gets the id 0."""

    special_tokens: tuple[str, ...] = option(())
    """Further special tokens, with the ids from 1 on. Those named <pad> or [PAD] (padding), <s>,
    <bos> or [BOS] (beginning of a sequence), [CLS], [SEP] or [MASK] are what they are called."""

    max_record_bytes: int = option(64 * 2**20)
    """Longest record."""

    def __post_init__(self) -> None:
        names = [self.end_token, *self.special_tokens]
        if len(set(names)) < len(names) or "" in names:
            raise UserError(f"--end-token and --special-tokens must differ: {', '.join(names)}")
        roles = [ROLES[name] for name in self.special_tokens if name in ROLES]
        twice = next((role for role in roles if roles.count(role) > 1), None)
        if twice is not None:
            both = [name for name in self.special_tokens if ROLES.get(name) == twice]
            raise UserError(f"--special-tokens {' '.join(both)}: each is the {twice}; give one")
        least = BYTES + len(names)
        if self.vocab_size < least:
            raise UserError(
                f"--vocab-size ({self.vocab_size}) must be at least {least}: {BYTES} bytes and "
                f"{len(names)} special tokens"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code.

    Raises:
        UserError: something that the user can fix.
    """
    run = parse_tool(argv, TrainConfig, PROGRAM, dry_run=True)
    config = run.config
    sources = find_sources(config.input, config.input_format)
    check_folder("--output", config.output)
    if run.invocation.dry_run:
        return 0
    library = import_library("tokenizers", "HuggingFaceTokenizer")
    tokenizer = library.Tokenizer(library.models.BPE())
    byte_level = library.pre_tokenizers.ByteLevel
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=[config.end_token, *config.special_tokens],
        # Sorted: the library numbers the letters in the order given.
        initial_alphabet=sorted(byte_level.alphabet()),
        show_progress=False,
    )
    found = texts(config, sources)
    first = next((text for text in found if text), None)
    if first is None:
        raise UserError(f"--input {' '.join(config.input)} holds no text; nothing to train on")
    tokenizer.train_from_iterator(itertools.chain([first], found), trainer)
    size = tokenizer.get_vocab_size()
    if size < config.vocab_size:
        say(f"the text has no pair left that occurs twice: {size} ids, not {config.vocab_size}")
    folder = Path(config.output)
    with atomic_path(folder / "tokenizer.json") as path:
        tokenizer.save(str(path))
    roles = {ROLES[name]: name for name in config.special_tokens if name in ROLES}
    settings = {
        "eos_token": config.end_token,
        **roles,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    with atomic_path(folder / "tokenizer_config.json") as path:
        path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    say(f"{folder / 'tokenizer.json'}: {size} ids")
    return 0


def texts(config: TrainConfig, sources: Sequence[Source]) -> Iterator[str]:
    """Yield every text of the inputs.

    Raises:
        UserError: a record cannot be used; the message names file and line.
    """
    parser = Parser(config.json_keys, config.max_record_bytes)
    for span in whole(sources):
        blocks = read_blocks(
            span, txt_documents="lines", keys=config.json_keys, limit=config.max_record_bytes
        )
        for block in blocks:
            for record in parser.parse(block):
                if isinstance(record, Problem):
                    raise UserError(record.text())
                for value in record.values:
                    yield from [value] if isinstance(value, str) else value


def say(text: str) -> None:
    """Print a line at once."""
    print(f"{PROGRAM}: {text}", flush=True)


if __name__ == "__main__":
    run_main(main, PROGRAM)
