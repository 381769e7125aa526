"""Look into token files: describe a .bin/.idx pair, verify or mend it, print documents.

tools/inspect_dataset.py PREFIX ...                     # sizes, types, lengths
tools/inspect_dataset.py PREFIX --verify                # read every offset and token
tools/inspect_dataset.py PREFIX --repair                # mend the index, keep the old one
tools/inspect_dataset.py PREFIX --documents 0 -1 --tokenizer-type ... # as text
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run from a clone, without installing
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from megatron.core.config import Config, option
from megatron.core.datasets.indexed import IndexedDataset, read_index
from megatron.core.datasets.merge import find_prefixes
from megatron.core.datasets.preprocess.report import read_json, sidecar_path
from megatron.core.datasets.repair import repair, verify
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.config import TokenizerConfig
from megatron.core.utils import UserError, human_bytes, human_count
from megatron.training.arguments import parse_tool, run_main

PROGRAM = "inspect_dataset"


class InspectConfig(Config):
    """What to look at."""

    input: tuple[str, ...] = option(aliases=("--path",))
    """Prefixes of pairs, or folders of pairs; may also come first, without the flag."""

    verify: bool = option(False)
    """Check every offset, boundary and token id."""

    repair: bool = option(False)
    """Mend wrong document boundaries, wrong offsets and a cut-off token file in place; the old
    index stays as PREFIX.idx.orig."""

    documents: tuple[int, ...] = option(())
    """Documents to print by number; negative ones count from the end. As text when tokenizer flags
    are given, else as ids."""

    max_tokens: int = option(200)
    """Tokens of each document to print."""


class ToolConfig(Config):
    """All that this tool can be told."""

    inspect: InspectConfig = option()
    tokenizer: TokenizerConfig = option()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code.

    Raises:
        UserError: something that the user can fix; --verify found damage.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words and not words[0].startswith("-"):
        words.insert(0, "--input")
    config, _ = parse_tool(words, ToolConfig, PROGRAM)
    inspect = config.inspect
    tokenizer = build_tokenizer(config.tokenizer) if config.tokenizer.tokenizer_type else None
    damaged = []
    for prefix in find_prefixes(inspect.input):
        if inspect.repair:
            changes = repair(prefix) or ["nothing to mend"]
            print("\n".join(f"{prefix}: {change}" for change in changes))
        print("\n".join(describe(prefix)))
        if inspect.verify:
            verdict = verify(prefix, tokenizer.vocab_size if tokenizer else None)
            damaged += verdict.problems
            state = "damaged" if verdict.problems else "sound"
            print(f"  verified      {state}, largest id {verdict.largest_id}")
        if inspect.documents:
            _print_documents(prefix, inspect, tokenizer)
    if damaged:
        raise UserError("\n".join(damaged))
    return 0


def describe(prefix: str) -> Iterator[str]:
    """Yield what a pair holds, line by line; a wrong last boundary is said, not raised."""
    index = read_index(prefix)
    lengths = index.sequence_lengths
    tokens = index.bin_bytes // index.dtype.itemsize
    yield prefix
    yield f"  tokens        {tokens} ({human_count(tokens)}), {index.dtype.name}"
    yield f"  size          {human_bytes(index.bin_bytes)}"
    yield f"  documents     {len(index.document_indices) - 1}"
    yield f"  sequences     {len(lengths)}"
    if len(lengths):
        yield (
            f"  lengths       {lengths.min()} to {lengths.max()}, median {np.median(lengths):.0f}, "
            f"mean {lengths.mean():.1f}"
        )
    if sidecar_path(prefix).is_file():
        note = read_json(sidecar_path(prefix))
        made_by = note.get("tokenizer", {})
        yield (
            f"  tokenizer     {made_by.get('type')}, {made_by.get('vocab_size')} ids, fingerprint "
            f"{str(made_by.get('fingerprint'))[:12]}; end of document "
            f"{'appended' if note.get('append_eod') else 'not appended'}"
        )
    for check in (index.check_last_boundary, index.check_bin):
        try:
            check()
        except UserError as error:
            yield f"  DAMAGED       {error}"


def _print_documents(prefix: str, config: InspectConfig, tokenizer: Any) -> None:
    data = IndexedDataset(prefix)
    for given in config.documents:
        number = given if given >= 0 else given + data.num_documents
        if not 0 <= number < data.num_documents:
            raise UserError(
                f"--documents {given}: {prefix} has {data.num_documents} documents, counted from 0"
            )
        first, last = data.document_indices[number : number + 2]
        parts = [data.get(i) for i in range(int(first), int(last))]
        length = sum(map(len, parts))
        print(f"--- document {number}: {len(parts)} sequences, {length} tokens")
        left = config.max_tokens
        for part in parts:
            ids = part[: max(left, 0)].tolist()
            left -= len(ids)
            if ids:
                print(tokenizer.decode(ids) if tokenizer else " ".join(map(str, ids)))
        if length > config.max_tokens:
            print(f"... ({length - config.max_tokens} tokens more; --max-tokens shows them)")


if __name__ == "__main__":
    run_main(main, PROGRAM)
