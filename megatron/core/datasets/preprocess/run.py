"""One run of preprocessing: check everything, encode, publish; or one share of it.

Nothing stands under the final names before all input has been read: tokens go to temporary files
beside them, and a run that fails removes these.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.datasets.indexed import IndexedDatasetBuilder, best_dtype
from megatron.core.datasets.preprocess import report
from megatron.core.datasets.preprocess.config import PreprocessConfig
from megatron.core.datasets.preprocess.encode import Encoded, Encoder, Tokenizer
from megatron.core.datasets.preprocess.reading import (
    Block,
    import_parquet,
    import_zstandard,
    lines_before,
    read_blocks,
)
from megatron.core.datasets.preprocess.records import Parser
from megatron.core.datasets.preprocess.report import Counts
from megatron.core.datasets.preprocess.sentences import nltk_splitter, simple_splitter
from megatron.core.datasets.preprocess.sources import Source, Span, find_sources
from megatron.core.datasets.preprocess.workers import encode_blocks
from megatron.core.datasets.sidecar import sidecar_path, write_json
from megatron.core.progress import Progress
from megatron.core.utils import UserError, check_folder, human_bytes, usable_cores


@dataclass(frozen=True)
class Job:
    """A checked run: everything that can be known before reading."""

    config: PreprocessConfig
    tokenizer: Tokenizer
    sources: list[Source]
    encoder: Encoder
    workers: int
    check: Callable[[], None]
    """Called between blocks; may raise to end the run."""

    def prefixes(self, prefix: str) -> dict[str, str]:
        """Return key -> prefix of its pair of files."""
        level = self.config.level
        return {key: f"{prefix}_{key}_{level}" for key in self.config.json_keys}

    def sidecar(self) -> dict[str, Any]:
        """Return what the note beside each pair says of how it was made."""
        return {
            "format": 1,
            "tokenizer": report.describe_tokenizer(self.tokenizer),
            "append_eod": self.config.append_eod,
            "level": self.config.level,
        }

    def options(self) -> dict[str, Any]:
        """Return the options and inputs that decide the output's bytes."""
        names = (
            "json_keys input_format txt_documents append_eod split_sentences keep_newlines "
            "sentence_splitter lang on_error max_record_bytes partitions"
        ).split()
        options: dict[str, Any] = {}
        for name in names:
            value = getattr(self.config, name)
            options[name] = list(value) if isinstance(value, tuple) else value
        options["inputs"] = [{"path": s.path, "bytes": s.size} for s in self.sources]
        return options


def prepare(
    config: PreprocessConfig, tokenizer: Tokenizer, check: Callable[[], None] = lambda: None
) -> Job:
    """Return the checked job; ``check`` is called between blocks and may raise to end the run.

    Raises:
        UserError: a flag, an input, the output's place or a package is wrong. No input has been
            read and nothing has been written.
    """
    if config.append_eod and tokenizer.eod is None:
        raise UserError(
            f"--append-eod: the tokenizer ({tokenizer.kind}) has no end-of-document token; choose "
            "one that has, add one to it, or leave out --append-eod"
        )
    sources = find_sources(config.input, config.input_format)
    for source in sources:
        if source.format == "txt" and len(config.json_keys) > 1:
            raise UserError(
                f"--json-keys {' '.join(config.json_keys)}: plain text ({source.path}) has no "
                "keys; give one, which names the output"
            )
        if source.format == "parquet":
            _check_columns(source, config.json_keys)
        if source.compression == ".zst":
            import_zstandard(source)
    _check_output(config, sources)
    splitter = None
    if config.split_sentences:
        if config.sentence_splitter == "nltk":
            splitter = nltk_splitter(config.lang, config.keep_newlines)
        else:
            splitter = simple_splitter(config.keep_newlines)
    parser = Parser(config.json_keys, config.max_record_bytes)
    encoder = Encoder(tokenizer, parser, splitter, config.append_eod)
    return Job(config, tokenizer, sources, encoder, config.workers or usable_cores(), check)


def _check_columns(source: Source, keys: Sequence[str]) -> None:
    parquet = import_parquet(source)
    try:
        names = parquet.read_schema(source.path).names
    except (OSError, ValueError) as error:
        raise UserError(f"{source.path} cannot be read as Parquet: {error}") from error
    missing = [key for key in keys if key not in names]
    if missing:
        raise UserError(
            f"--json-keys: {source.path} has no column {', '.join(map(repr, missing))}; its "
            f"columns are {', '.join(map(repr, names))}"
        )


def _check_output(config: PreprocessConfig, sources: Sequence[Source]) -> None:
    prefix = config.output_prefix
    if not os.path.basename(prefix):
        raise UserError(f"--output-prefix {prefix} is a folder; add the start of a file name")
    folder = Path(prefix).absolute().parent
    check_folder("--output-prefix", folder if os.path.lexists(prefix) else prefix)
    outputs = {
        os.path.realpath(f"{prefix}_{key}_{config.level}{ending}")
        for key in config.json_keys
        for ending in (".bin", ".idx", ".json")
    }
    outputs.add(os.path.realpath(f"{prefix}_report.json"))
    for source in sources:
        if os.path.realpath(source.path) in outputs:
            raise UserError(
                f"--output-prefix {prefix} would overwrite the input {source.path}; choose another"
            )


def encode_spans(
    job: Job, spans: Sequence[Span], prefix: str, *, may_be_empty: bool = False
) -> Counts:
    """Encode the spans and publish their pairs, notes and report under ``prefix``.

    Args:
        job: the checked job.
        spans: what to read, in order.
        prefix: start of the output's names.
        may_be_empty: a share may keep no record; a whole run may not.

    Raises:
        UserError: the input is bad, under --on-error stop, or no record was kept.
    """
    started = time.monotonic()
    counts = Counts()
    dtype = best_dtype(job.tokenizer.vocab_size)
    with contextlib.ExitStack() as stack:
        builders = {
            key: stack.enter_context(IndexedDatasetBuilder(path, dtype, job.tokenizer.vocab_size))
            for key, path in job.prefixes(prefix).items()
        }
        for encoded in _encoded(job, spans, counts):
            for (key, builder), documents in zip(builders.items(), encoded.documents, strict=True):
                builder.add_documents(documents.tokens, documents.lengths, documents.sequences)
                counts.documents[key] += len(documents.sequences)
                counts.sequences[key] += len(documents.lengths)
                counts.tokens[key] += len(documents.tokens)
        if not may_be_empty:
            check_kept(counts, job.config.json_keys)
        for builder in builders.values():
            builder.seal()
        for key, path in job.prefixes(prefix).items():
            write_json(sidecar_path(path), job.sidecar() | _sizes(counts, key))
            builders[key].publish()
    write_report(job, counts, prefix, time.monotonic() - started)
    return counts


def write_report(job: Job, counts: Counts, prefix: str, seconds: float) -> None:
    """Write ``PREFIX_report.json``, which also marks a share as complete."""
    content = {
        **counts.to_json(),
        "tokenizer": report.describe_tokenizer(job.tokenizer),
        "dtype": best_dtype(job.tokenizer.vocab_size).name,
        "options": job.options(),
        "versions": report.versions(),
        "workers": job.workers,
        "seconds": round(seconds, 3),
    }
    write_json(Path(f"{prefix}_report.json"), content)


def check_kept(counts: Counts, keys: Sequence[str]) -> None:
    """Raise `UserError` unless every key has tokens: an empty set would only fail in training."""
    if not counts.kept:
        first = next((messages[0] for messages in counts.first.values() if messages), None)
        raise UserError(
            f"nothing to write: {counts.summary()}" + (f"; the first: {first}" if first else "")
        )
    empty = [key for key in keys if not counts.tokens[key]]
    if empty:
        raise UserError(
            f"nothing to write for the key {', '.join(map(repr, empty))}: it is empty in every "
            f"record; {counts.summary()}"
        )


def _sizes(counts: Counts, key: str) -> dict[str, Any]:
    return {
        "key": key,
        "documents": counts.documents[key],
        "sequences": counts.sequences[key],
        "tokens": counts.tokens[key],
    }


def _encoded(job: Job, spans: Sequence[Span], counts: Counts) -> Iterator[Encoded]:
    """Yield encoded blocks in order, counting records and stopping at bad ones."""
    total = sum(span.end - span.start for span in spans)
    progress = Progress(total, job.config.log_interval)
    position = [0, 0]
    stream = encode_blocks(job.encoder, _blocks(job, spans, position), job.workers)
    origins = {span.source.path: span for span in spans}
    before: dict[str, int] = {}

    def speeds(seconds: float) -> str:
        tokens = counts.tokens.total()
        return (
            f"{counts.read} records ({counts.read / seconds:.0f}/s) | {tokens} tokens "
            f"({tokens / seconds:.0f}/s) | {human_bytes(sum(position) / seconds)}/s"
        )

    try:
        for block, encoded in stream:
            job.check()
            counts.read += encoded.read
            counts.kept += encoded.kept
            counts.skipped.update(encoded.skipped)
            for problem in encoded.problems:
                if block.path not in before:
                    before[block.path] = lines_before(origins[block.path])
                message = problem.text(before[block.path])
                if job.config.on_error == "stop" and problem.kind != "empty":
                    raise UserError(
                        f"{message}\nnothing was written; --on-error skip leaves such records out "
                        "and counts them"
                    )
                counts.note(problem.kind, message)
            yield encoded
            progress.update(sum(position), counts.read, speeds)
    except UserError:
        job.check()  # a signal to the whole group also ends the workers; it is the reason then
        raise
    finally:
        progress.close()
        stream.close()  # type: ignore[attr-defined]


def _blocks(job: Job, spans: Sequence[Span], position: list[int]) -> Iterator[Block]:
    """Yield the blocks of all spans; ``position`` is [bytes of finished spans, of this one]."""

    def moved(here: int) -> None:
        position[1] = here

    for span in spans:
        yield from read_blocks(
            span,
            txt_documents=job.config.txt_documents,
            keys=job.config.json_keys,
            limit=job.config.max_record_bytes,
            on_bytes=moved,
        )
        position[0] += span.end - span.start
        position[1] = 0
