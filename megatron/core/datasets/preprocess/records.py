"""From a block of bytes to records: one text per key, or a reason why a record cannot be used."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from megatron.core.datasets.preprocess.reading import Block

Kind = Literal[
    "invalid-json",
    "invalid-utf8",
    "missing-key",
    "wrong-type",
    "nul-byte",
    "too-long",
    "not-encodable",
    "empty",
]

Value = str | list[str]
"""Text of a document, or its sentences when the input already gives them as a list."""


@dataclass(frozen=True)
class Problem:
    """Why a record was not used. ``line`` counts from the start of the span."""

    kind: Kind
    path: str
    line: int
    detail: str
    unit: str = "line"

    def text(self, lines_before: int = 0) -> str:
        """Return the message for people."""
        return f"{self.path}, {self.unit} {self.line + lines_before}: {self.detail}"


@dataclass(frozen=True)
class Record:
    """Texts of one document, in the order of the keys."""

    line: int
    values: tuple[Value, ...]


class Parser:
    """Reads the records of blocks for some keys."""

    def __init__(self, keys: tuple[str, ...], limit: int) -> None:
        self.keys = keys
        self.limit = limit
        self._decode = json.JSONDecoder().decode

    def parse(self, block: Block) -> Iterator[Record | Problem]:
        """Yield every record of a block, or what is wrong with it; blank lines are no records."""
        if block.too_long:
            yield self._too_long(block, block.first_line)
        elif block.kind == "rows":
            for row, record in enumerate(block.rows, block.first_line):
                yield self._pick(block, row, record, "")
        elif block.kind == "jsonl":
            yield from self._json_lines(block)
        else:
            yield from self._texts(block)

    def _json_lines(self, block: Block) -> Iterator[Record | Problem]:
        lines = _decoded_lines(block.data)
        last = block.first_line + len(lines) - 1
        for number, line in enumerate(lines, block.first_line):
            if isinstance(line, bytes):
                yield self._bad_utf8(block, number, line)
                continue
            if not line or line.isspace():
                continue
            if self._exceeds(line):
                yield self._too_long(block, number)
                continue
            try:
                record = self._decode(line)
            except (ValueError, RecursionError) as error:
                cut_off = block.cut_off and number == last
                yield Problem(
                    "invalid-json", block.path, number, _json_detail(line, error, cut_off)
                )
                continue
            yield self._pick(block, number, record, line)

    def _texts(self, block: Block) -> Iterator[Record | Problem]:
        """Yield the documents of plain text; line ends become newlines."""
        data = block.data.replace(b"\r\n", b"\n")
        if block.kind == "file":
            pieces = [data]
        else:
            pieces = data.split(b"\n\n" if block.kind == "paragraphs" else b"\n")
        separator = 2 if block.kind == "paragraphs" else 1
        line = block.first_line
        for piece in pieces:
            text = piece if block.kind == "file" else piece.strip(b"\n")
            start = line + (len(piece) - len(piece.lstrip(b"\n")) if text is not piece else 0)
            line += piece.count(b"\n") + separator
            if block.kind == "file" or not text.isspace() and text:
                yield self._text(block, start, text)

    def _text(self, block: Block, line: int, data: bytes) -> Record | Problem:
        if len(data) > self.limit:
            return self._too_long(block, line)
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            within = data[: error.start].count(b"\n")
            return self._bad_utf8(block, line + within, data, error)
        if "\0" in text:
            within = text[: text.index("\0")].count("\n")
            return Problem("nul-byte", block.path, line + within, "the text holds a NUL byte")
        return Record(line, (text,))

    def _pick(self, block: Block, line: int, record: Any, raw: str) -> Record | Problem:
        unit = "row" if block.kind == "rows" else "line"

        def problem(kind: Kind, detail: str) -> Problem:
            return Problem(kind, block.path, line, detail, unit)

        if not isinstance(record, dict):
            hint = "; a JSON array is turned into lines by `jq -c '.[]'`"
            found = f"the line holds {_name(record)}, not an object with keys"
            return problem("wrong-type", found + (hint if isinstance(record, list) else ""))
        values = []
        for key in self.keys:
            value = record.get(key)
            if value is None and (key not in record or unit == "row"):
                there = ", ".join(repr(name) for name in list(record)[:8]) or "none"
                return problem("missing-key", f"the key {key!r} is missing (keys there: {there})")
            texts: list[Any] = value if isinstance(value, list) else [value]
            wrong = next((text for text in texts if not isinstance(text, str)), None)
            if wrong is not None or value is None:
                where = f"the value of {key!r} is" if value is wrong else f"{key!r} lists"
                return problem("wrong-type", f"{where} {_name(wrong)}, not a string")
            for text in texts:
                if "\0" in text:
                    return problem("nul-byte", f"the value of {key!r} holds a NUL byte")
                if "\\u" in raw and _has_surrogate(text):
                    detail = f"the value of {key!r} holds half a surrogate pair, which is no text"
                    return problem("invalid-utf8", detail)
                if unit == "row" and len(text.encode()) > self.limit:
                    return self._too_long(block, line)
            values.append(value)
        return Record(line, tuple(values))

    def _exceeds(self, line: str) -> bool:
        # A character is one to four bytes: most lines need no exact count.
        return len(line) * 4 > self.limit and len(line.encode()) > self.limit

    def _too_long(self, block: Block, line: int) -> Problem:
        what = {"file": "the file", "paragraphs": "the paragraph", "rows": "the text"}
        detail = (
            f"{what.get(block.kind, 'the line')} exceeds --max-record-bytes ({self.limit}); raise "
            "it if there is memory for 150 times as much per worker"
        )
        if block.kind == "file":
            detail += ", or take --txt-documents paragraphs"
        return Problem(
            "too-long", block.path, line, detail, "row" if block.kind == "rows" else "line"
        )

    def _bad_utf8(
        self, block: Block, line: int, data: bytes, error: UnicodeDecodeError | None = None
    ) -> Problem:
        if error is None:
            try:
                data.decode()
            except UnicodeDecodeError as found:
                error = found
        assert error is not None
        byte = data[error.start]
        detail = f"not valid UTF-8 (byte 0x{byte:02X} at byte {error.start + 1})"
        if line == 1 and data[:2] in (b"\xff\xfe", b"\xfe\xff"):
            detail += "; the file looks like UTF-16, `iconv -f UTF-16 -t UTF-8` converts it"
        return Problem("invalid-utf8", block.path, line, detail)


def _decoded_lines(data: bytes) -> list[str] | list[str | bytes]:
    """Return the lines as text; those that are no UTF-8 stay bytes."""
    data = data.removesuffix(b"\n")
    try:
        return data.decode().split("\n")
    except UnicodeDecodeError:
        return [_decoded(line) for line in data.split(b"\n")]


def _decoded(line: bytes) -> str | bytes:
    try:
        return line.decode()
    except UnicodeDecodeError:
        return line


def _json_detail(line: str, error: Exception, cut_off: bool) -> str:
    if line.strip() in ("[", "{"):
        return (
            "not a JSON object on one line; the file is JSON over several lines, which `jq -c .` "
            "(for an array `jq -c '.[]'`) turns into lines"
        )
    reason = getattr(error, "msg", None) or str(error).split("\n")[0]
    column = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
    ending = "; the file ends in the middle of this line" if cut_off else ""
    return f"not valid JSON ({reason}{column}){ending}"


def _has_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _name(value: Any) -> str:
    names = {
        dict: "an object",
        list: "a list",
        bool: "a boolean",
        type(None): "null",
        str: "a string",
    }
    names |= {int: "a number", float: "a number", bytes: "bytes"}
    return names.get(type(value), type(value).__name__)
