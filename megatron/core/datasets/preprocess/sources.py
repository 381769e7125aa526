"""Inputs of preprocessing: which files, of which format, and how they are cut into shares."""

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron.core.utils import UserError

Format = Literal["jsonl", "txt", "parquet"]

FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".ndjson": "jsonl",
    ".txt": "txt",
    ".parquet": "parquet",
}
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")


@dataclass(frozen=True)
class Source:
    """One input file."""

    path: str
    format: Format
    compression: str
    """One of `COMPRESSIONS`, or the empty string."""
    size: int
    """Bytes on disk."""


@dataclass(frozen=True)
class Span:
    """The records of a source that start in its bytes ``start`` to ``end``."""

    source: Source
    start: int
    end: int


def find_sources(inputs: Sequence[str], input_format: str = "auto") -> list[Source]:
    """Return every input file: as given, globs and folders sorted by name.

    Raises:
        UserError: something matches nothing, is given twice or cannot be read.
    """
    paths: list[str] = []
    for given in inputs:
        paths += _expand(given)
    seen: dict[str, str] = {}
    for path in paths:
        real = os.path.realpath(path)
        if real in seen:
            raise UserError(f"--input names {path} twice; its documents would be doubled")
        seen[real] = path
        if not os.access(path, os.R_OK):
            raise UserError(f"--input {path} may not be read by this user")
    return [_source(path, input_format) for path in paths]


def _expand(given: str) -> list[str]:
    if os.path.isfile(given):
        return [given]
    if os.path.isdir(given):
        found = sorted(str(path) for path in Path(given).rglob("*") if _is_input(path))
        if not found:
            known = ", ".join([*FORMATS, *COMPRESSIONS])
            raise UserError(f"--input {given}: the folder holds no file that ends in {known}")
        return found
    found = sorted(path for path in glob.glob(given, recursive=True) if os.path.isfile(path))
    if not found:
        raise UserError(
            f"--input {given}: no such file or folder, and no file matches it as a glob"
        )
    return found


def _is_input(path: Path) -> bool:
    name, _ = _strip_compression(path.name)
    hidden = path.name.startswith(".")
    return not hidden and os.path.splitext(name)[1].lower() in FORMATS and path.is_file()


def _strip_compression(name: str) -> tuple[str, str]:
    stem, ending = os.path.splitext(name)
    return (stem, ending.lower()) if ending.lower() in COMPRESSIONS else (name, "")


def _source(path: str, input_format: str) -> Source:
    name, compression = _strip_compression(path)
    kind: Format
    if input_format == "auto":
        kind = FORMATS.get(os.path.splitext(name)[1].lower(), "jsonl")
    else:
        kind = input_format  # type: ignore[assignment]
    if kind == "parquet" and compression:
        raise UserError(f"--input {path}: Parquet is compressed inside; unpack the file first")
    return Source(path, kind, compression, os.path.getsize(path))


def whole(sources: Sequence[Source]) -> list[Span]:
    """Return one span per source."""
    return [Span(source, 0, source.size) for source in sources]


def share(
    sources: Sequence[Source], index: int, count: int, txt_documents: str = "file"
) -> list[Span]:
    """Return share ``index`` of ``count``: a contiguous part of all bytes, in input order.

    Uncompressed files with a record per line are cut inside; any other file belongs whole to the
    share in which it starts. The shares, one after the other, are the whole input.
    """
    total = sum(source.size for source in sources)
    low, high = total * index // count, total * (index + 1) // count
    spans = []
    for first, source in _starts(sources):
        if _has_lines(source, txt_documents):
            start, end = max(low - first, 0), min(high - first, source.size)
            if start < end:
                spans.append(Span(source, start, end))
        elif low <= first < high:
            spans.append(Span(source, 0, source.size))
    return spans


def _starts(sources: Sequence[Source]) -> Iterator[tuple[int, Source]]:
    first = 0
    for source in sources:
        # A file without bytes belongs nowhere, and would else end up past the last share.
        if source.size:
            yield first, source
        first += source.size


def _has_lines(source: Source, txt_documents: str) -> bool:
    lines = source.format == "jsonl" or (source.format == "txt" and txt_documents == "lines")
    return lines and not source.compression
