"""Look into token files and what a run read of them.

tools/inspect_dataset.py PREFIX ...                     # sizes, types, lengths
tools/inspect_dataset.py PREFIX --verify                # read every offset and token
tools/inspect_dataset.py PREFIX --repair                # mend the index, keep the old one
tools/inspect_dataset.py PREFIX --documents 0 -1 --tokenizer-type ... # as text
tools/inspect_dataset.py --iteration 1200 --config run.json   # what that iteration read, as text
tools/inspect_dataset.py --sample 38400 --load checkpoints    # one sample of a run, likewise

The last two find samples as the run does, from its config alone; flags that follow win over it, for
files that have moved.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run from a clone, without installing
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from megatron.core.config import Config, Spec, option, specs
from megatron.core.datasets.indexed import IndexedDataset, read_index
from megatron.core.datasets.merge import find_prefixes
from megatron.core.datasets.repair import repair, verify
from megatron.core.datasets.sidecar import read_json, sidecar_path
from megatron.core.datasets.trace import Trace
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.config import TokenizerConfig
from megatron.core.utils import UserError, human_bytes, human_count
from megatron.training import data_trace
from megatron.training.arguments import Invocation, parse_tool, run_main
from megatron.training.config import RunConfig
from megatron.training.flags.command_line import Vocabulary, load_file, read_command_line

PROGRAM = "inspect_dataset"


class InspectConfig(Config):
    """What to look at."""

    input: tuple[str, ...] = option((), aliases=("--path",))
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

    iteration: int | None = option(None)
    """Print what this iteration of a run read. The run is given by --config FILE, as --dump-config
    wrote it, or by --load FOLDER of its checkpoints."""

    sample: tuple[int, ...] = option(())
    """Print these samples of a run, by their numbers in it, which its metrics file has."""


class ToolConfig(Config):
    """All that this tool can be told about files."""

    inspect: InspectConfig = option()
    tokenizer: TokenizerConfig = option()


class RunToolConfig(Config):
    """All that this tool can be told about a run."""

    inspect: InspectConfig = option()
    run: RunConfig = option()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code.

    Raises:
        UserError: something that the user can fix; --verify found damage.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if {"--iteration", "--sample"} & {word.partition("=")[0] for word in words}:
        return _inspect_run(words)
    config = parse_tool(words, ToolConfig, PROGRAM, leading="input").config
    inspect = config.inspect
    if not inspect.input:
        raise UserError("name what to look at: a PREFIX or a folder, or --iteration of a run")
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


def _inspect_run(words: list[str]) -> int:
    """Print what a run read, by iteration or by numbers of samples."""
    config = parse_tool(words, RunToolConfig, PROGRAM, base=_run_values(words)).config
    inspect, run = config.inspect, config.run
    if inspect.input:
        raise UserError(f"{' '.join(inspect.input)}: a run names its own files; give no PREFIX")
    tokenizer = build_tokenizer(run.tokenizer)
    reader = data_trace.RunReader(run, tokenizer)
    wanted = list(inspect.sample)
    for position in wanted:
        reader.check(position)
    if inspect.iteration is not None:
        positions = data_trace.positions_of(run, inspect.iteration)
        skipped = inspect.iteration in run.training.iterations_to_skip
        print(
            f"iteration {inspect.iteration}: samples {positions.start} to {positions.stop - 1}"
            + (", left out by --iterations-to-skip" if skipped else "")
        )
        wanted += positions
    for position in wanted:
        place = data_trace.place_of(run, position)
        print(
            f"=== sample {position} (iteration {place.iteration}, microbatch {place.microbatch}"
            + (f", replica {place.replica})" if run.data_parallel_size > 1 else ")")
        )
        _print_trace(reader.read(position), tokenizer, inspect.max_tokens)
    return 0


def _run_values(words: list[str]) -> dict[str, Any]:
    """Return the values of the run that --config or else --load names."""
    declared = specs(RunToolConfig) | {"config": specs(Invocation)["config"]}
    given = given_values(words, declared)
    if "config" in given:
        content = load_file(given["config"])
        # A file that --dump-config wrote holds all values; one by hand those that parsing takes.
        return data_trace.stored_values(content["config"]) if "origins" in content else {}
    if "load" not in given:
        raise UserError(
            "which run? Give --config FILE, as --dump-config wrote it, or --load FOLDER of its "
            "checkpoints"
        )
    return stored_run(given)


def given_values(words: Sequence[str], declared: Mapping[str, Spec]) -> dict[str, str]:
    """Return the last word of each flag on a command line, by name."""
    return {
        item.target.name: item.values[-1]
        for item in read_command_line(words, Vocabulary(declared, {}))
        if isinstance(item.target, Spec) and item.values
    }


def stored_run(given: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of the run that wrote the checkpoint of --load and --ckpt-step.

    Raises:
        UserError: there is none.
    """
    from megatron.training.checkpoints import (
        source as checkpoint_source,  # torch, only where there is a checkpoint
    )

    step = given.get("ckpt_step")
    if step is not None and not step.isdigit():
        raise UserError(f"--ckpt-step takes an iteration, not {step!r}")
    stored = checkpoint_source.stored_config(given["load"], None if step is None else int(step))
    if stored is None:
        raise UserError(f"--load ({given['load']}) holds no checkpoint")
    return data_trace.stored_values(stored)


def _print_trace(trace: Trace, tokenizer: Tokenizer, max_tokens: int) -> None:
    count = len(trace.pieces)
    print(
        f"    sample {trace.number} of {trace.source}: {len(trace.tokens)} tokens in {count} "
        f"piece{'s' * (count > 1)}, loss at {trace.counted}"
    )
    for piece in trace.pieces:
        print(
            f"--- {trace.source} document {piece.document}, tokens {piece.first} to "
            f"{piece.end - 1} of {piece.length}"
        )
        if not trace.is_rearranged:
            _print_text(piece.tokens.tolist(), tokenizer, max_tokens)
    if trace.encoder is not None and trace.target is not None:
        most = max_tokens * len(trace.pieces)
        print(f"--- what the encoder reads, {len(trace.encoder)} tokens")
        _print_text(trace.encoder.tolist(), tokenizer, most)
        what = "what the decoder is to say" if trace.has_decoder else "what was masked"
        print(f"--- {what}, {len(trace.target)} tokens")
        _print_text(trace.target.tolist(), tokenizer, most)
    elif trace.is_rearranged:
        print("--- as the model reads it")
        _print_text(trace.tokens.tolist(), tokenizer, max_tokens * len(trace.pieces))


def _print_text(ids: list[int], tokenizer: Tokenizer, max_tokens: int) -> None:
    print(tokenizer.decode(ids[:max_tokens]))
    if len(ids) > max_tokens:
        print(f"... ({len(ids) - max_tokens} tokens more; --max-tokens shows them)")


if __name__ == "__main__":
    run_main(main, PROGRAM)
