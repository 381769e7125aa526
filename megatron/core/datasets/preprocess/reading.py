"""Reading inputs as blocks of whole records, in bounded memory.

A block is about a megabyte and never cuts a record, so blocks can be parsed in any process. Where
blocks are cut depends on the input alone. A record longer than the limit is dropped while it is
read; the block that stands for it says so.
"""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from megatron.core.datasets.preprocess.sources import Source, Span
from megatron.core.utils import UserError, human_bytes

BLOCK_BYTES = 1 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

Delimiters = tuple[bytes, ...]
DELIMITERS: dict[str, Delimiters] = {
    "lines": (b"\n",),
    "paragraphs": (b"\n\n", b"\n\r\n"),
    "file": (),
}


@dataclass(frozen=True)
class Block:
    """Whole records of one source.

    ``lines`` are counted from the start of the span, see `lines_before`.
    """

    path: str
    kind: str
    """How ``data`` divides into records: jsonl, lines, paragraphs, file or rows."""
    data: bytes = b""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Records of Parquet, for the kind rows."""
    first_line: int = 1
    """Line (or row) number of the first record."""
    too_long: bool = False
    """The block stands for one record that exceeds the limit."""
    cut_off: bool = False
    """The last record has no newline: the file ends inside or right after it."""

    @property
    def size(self) -> int:
        """Bytes that the block holds, roughly."""
        texts = (text for row in self.rows for text in row.values() if isinstance(text, str))
        return len(self.data) + sum(map(len, texts))


def read_blocks(
    span: Span,
    *,
    txt_documents: str,
    keys: tuple[str, ...],
    limit: int,
    block_bytes: int = BLOCK_BYTES,
    on_bytes: Callable[[int], None] = lambda position: None,
) -> Iterator[Block]:
    """Yield the blocks of a span.

    Args:
        span: what to read.
        txt_documents: what is one document of plain text.
        keys: columns to take from Parquet.
        limit: bytes of the longest record.
        block_bytes: size of a block, when no record is longer.
        on_bytes: told the position in the file on disk, for progress.

    Raises:
        UserError: the file is damaged, or the package that reads it is missing.
    """
    source = span.source
    if source.format == "parquet":
        yield from _parquet_blocks(source, keys, on_bytes)
        return
    kind = "jsonl" if source.format == "jsonl" else txt_documents
    delimiters = DELIMITERS["lines" if kind == "jsonl" else kind]
    chunks = _chunks(span, block_bytes, on_bytes)
    for block in _cut(chunks, delimiters, limit):
        yield Block(source.path, kind, **block)


def lines_before(span: Span) -> int:
    """Return the lines of the file before the span's first record; reads them all."""
    if not span.start:
        return 0
    count = 0
    with open(span.source.path, "rb") as file:
        end = _line_start(file, span.start)
        file.seek(0)
        while end > 0 and (data := file.read(min(end, BLOCK_BYTES))):
            count += data.count(b"\n")
            end -= len(data)
    return count


def _cut(chunks: Iterator[bytes], delimiters: Delimiters, limit: int) -> Iterator[dict[str, Any]]:
    """Join chunks and cut them after the last delimiter; yield the fields of blocks."""
    parts: list[bytes] = []
    size = 0
    line = 1
    dropping = False
    for chunk in _with_whole_delimiters(chunks, delimiters):
        if dropping:
            end = min((chunk.index(d) + len(d) for d in delimiters if d in chunk), default=-1)
            dropping = end < 0
            dropped, chunk = (chunk, b"") if dropping else (chunk[:end], chunk[end:])
            line += dropped.count(b"\n")
        end = max((chunk.rfind(d) + len(d) for d in delimiters if d in chunk), default=-1)
        if end >= 0:
            data = b"".join([*parts, chunk[:end]])
            yield {"data": data, "first_line": line}
            line += data.count(b"\n")
            chunk = chunk[end:]
            parts, size = [], 0
        if chunk:
            parts.append(chunk)
            size += len(chunk)
        if size > limit:
            yield {"first_line": line, "too_long": True}
            line += sum(part.count(b"\n") for part in parts)
            dropping = True
            parts, size = [], 0
    if size:
        yield {"data": b"".join(parts), "first_line": line, "cut_off": True}


def _with_whole_delimiters(chunks: Iterator[bytes], delimiters: Delimiters) -> Iterator[bytes]:
    """Yield the same bytes with no chunk ending inside a delimiter."""
    held = b""
    for chunk in chunks:
        chunk = held + chunk
        begun = [d[:n] for d in delimiters for n in range(len(d)) if chunk.endswith(d[:n])]
        keep = 0 if chunk.endswith(delimiters) else max(map(len, begun), default=0)
        held = chunk[len(chunk) - keep :]
        if keep < len(chunk):
            yield chunk[: len(chunk) - keep]
    if held:
        yield held


def _chunks(span: Span, size: int, on_bytes: Callable[[int], None]) -> Iterator[bytes]:
    """Yield the unpacked bytes of a span, without a byte order mark."""
    start = b""
    begins = span.start == 0
    for chunk in _unpacked(span, size, on_bytes):
        if begins:
            start += chunk
            if len(start) < len(BYTE_ORDER_MARK):
                continue
            begins, chunk = False, start.removeprefix(BYTE_ORDER_MARK)
        yield chunk
    if begins and start:
        yield start


def _unpacked(span: Span, size: int, on_bytes: Callable[[int], None]) -> Iterator[bytes]:
    source = span.source
    with open(source.path, "rb") as file:
        if not source.compression:
            start = _line_start(file, span.start) if span.start else 0
            end = _line_start(file, span.end) if span.end < source.size else source.size
            file.seek(start)
            while start < end and (data := file.read(min(size, end - start))):
                start += len(data)
                on_bytes(start - span.start)
                yield data
            return
        unpacked = _open_compressed(source, file)
        try:
            while data := unpacked(size):
                on_bytes(file.tell())
                yield data
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            raise UserError(
                f"{source.path} is cut off or damaged as a {source.compression} file: {error}"
            ) from error


def _line_start(file: BinaryIO, position: int) -> int:
    """Return where the first line starts that begins at ``position`` or later."""
    file.seek(position - 1)
    while data := file.read(BLOCK_BYTES):
        if (newline := data.find(b"\n")) >= 0:
            return file.tell() - len(data) + newline + 1
    return file.tell()


def _open_compressed(source: Source, file: BinaryIO) -> Callable[[int], bytes]:
    if source.compression == ".gz":
        return gzip.GzipFile(fileobj=file, mode="rb").read
    if source.compression == ".bz2":
        return bz2.BZ2File(file).read
    if source.compression == ".xz":
        return lzma.LZMAFile(file).read
    return _zstd_reader(source, file)


def _zstd_reader(source: Source, file: BinaryIO) -> Callable[[int], bytes]:
    zstandard = import_zstandard(source)
    stream = _zstd_frames(zstandard, file)

    def read(size: int) -> bytes:
        try:
            return next(stream, b"")
        except zstandard.ZstdError as error:
            raise OSError(str(error)) from error

    return read


def _zstd_frames(zstandard: Any, file: BinaryIO) -> Iterator[bytes]:
    """Yield unpacked pieces of every frame; the stream reader would not notice a cut-off file."""
    frame = None
    while data := file.read(1 << 17):
        while data:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            if piece := frame.decompress(data):
                yield piece
            data = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("the last frame does not end")


def import_zstandard(source: Source) -> Any:
    """Return the package that reads .zst, or say how to get it."""
    try:
        import zstandard
    except ImportError:
        raise UserError(
            f"--input {source.path}: reading .zst needs the package zstandard "
            "(pip install zstandard)"
        ) from None
    return zstandard


def import_parquet(source: Source) -> Any:
    """Return the module that reads Parquet, or say how to get it."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(
            f"--input {source.path}: reading Parquet needs the package pyarrow "
            "(pip install pyarrow)"
        ) from None
    return pyarrow.parquet


def _parquet_blocks(
    source: Source, keys: tuple[str, ...], on_bytes: Callable[[int], None]
) -> Iterator[Block]:
    parquet = import_parquet(source)
    try:
        with parquet.ParquetFile(source.path) as file:
            present = [key for key in keys if key in file.schema_arrow.names]
            rows = file.metadata.num_rows
            row = 1
            # Few rows at a time: a row may be a whole book.
            for batch in file.iter_batches(batch_size=256, columns=present):
                if present:
                    records = batch.to_pylist()
                else:
                    records = [{} for _ in range(batch.num_rows)]
                yield Block(source.path, "rows", rows=records, first_line=row)
                row += batch.num_rows
                on_bytes(source.size * (row - 1) // max(rows, 1))
    except (OSError, ValueError) as error:  # pyarrow's errors derive from these
        raise UserError(
            f"{source.path} cannot be read as Parquet ({human_bytes(source.size)}): {error}"
        ) from error
