"""Where rows of tokens come from: a token file, or made-up numbers.

Both give the lengths of their rows, and the tokens of several rows joined. The rows of a sample are
scattered over the file (their order is shuffled), so a sample of many short documents is gathered
in one indexed read: time follows the tokens, not the documents.
"""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.indexed import IndexedDataset, bin_path

MOCK_ROWS = 100_000
FEW_MOCK_ROWS = 2000
"""Enough for long runs, since rows repeat, where an index over more takes longer than the run."""
MOCK_LONGEST = 4096

Tokens = npt.NDArray[np.int64]


class TokenSource(Protocol):
    """Rows of tokens by number."""

    @property
    def name(self) -> str:
        """What to call it in a message."""

    @property
    def prefix(self) -> str | None:
        """Path of the pair of files without ending; None for made-up rows."""

    @property
    def row_name(self) -> str:
        """What a message calls a row."""

    @property
    def sequence_lengths(self) -> npt.NDArray[Any]:
        """Tokens of each row."""

    @property
    def documents(self) -> npt.NDArray[np.int64]:
        """First row of each document, and the number of all rows."""

    def join(self, rows: npt.NDArray[Any], first: int, last: int) -> Tokens:
        """Return the tokens of ``rows``, one after the other.

        Args:
            rows: numbers of the rows.
            first: tokens to leave out at the start of the first row.
            last: tokens to take of the last row, counted from its start.
        """


class FileSource:
    """The sequences of a ``.bin``/``.idx`` pair."""

    row_name = "sequence"

    def __init__(self, prefix: str, *, mmap: bool = True) -> None:
        self.dataset = IndexedDataset(prefix, mmap=mmap)
        self.name = self.prefix = prefix
        self.sequence_lengths = self.dataset.sequence_lengths
        self.documents = self.dataset.document_indices
        self._flat: npt.NDArray[Any] | None = None
        if mmap and self.dataset.num_tokens:
            self._flat = np.memmap(bin_path(prefix), self.dataset.dtype, mode="r").view(np.ndarray)

    def join(self, rows: npt.NDArray[Any], first: int, last: int) -> Tokens:
        if self._flat is None:
            return self._read(rows, first, last)
        begin = self.dataset.sequence_pointers[rows] // self.dataset.dtype.itemsize
        counts = self.sequence_lengths[rows].astype(np.int64)
        begin[0] += first
        counts[-1] = last
        counts[0] -= first
        if len(rows) == 1:
            return self._flat[begin[0] : begin[0] + counts[0]].astype(np.int64)
        places = np.arange(counts.sum())
        places += np.repeat(begin - (np.cumsum(counts) - counts), counts)
        return self._flat[places].astype(np.int64)

    def _read(self, rows: npt.NDArray[Any], first: int, last: int) -> Tokens:
        parts = []
        for position, row in enumerate(rows.tolist()):
            start = first if position == 0 else 0
            end = last if position == len(rows) - 1 else int(self.sequence_lengths[row])
            parts.append(self.dataset.get(row, start, end - start))
        return np.concatenate(parts).astype(np.int64)


class MockSource:
    """Made-up rows, Megatron-core's: counting numbers, each row closed by end-of-document."""

    name = "mock data"
    row_name = "sequence"
    prefix = None

    def __init__(self, vocab_size: int, eod: int, rows: int = MOCK_ROWS) -> None:
        self.vocab_size = vocab_size
        self.eod = eod
        self.sequence_lengths = np.random.default_rng(0).integers(
            1, MOCK_LONGEST, rows, dtype=np.int32
        )
        self.documents = np.arange(rows + 1, dtype=np.int64)

    def join(self, rows: npt.NDArray[Any], first: int, last: int) -> Tokens:
        counts = self.sequence_lengths[rows].astype(np.int64)
        ends = np.cumsum(counts)
        tokens: Tokens = np.arange(1, int(ends[-1]) + 1) - np.repeat(ends - counts, counts)
        tokens %= self.vocab_size
        tokens[ends - 1] = self.eod
        stop = int(ends[-1]) - int(counts[-1]) + last
        return tokens[first:stop]


def by_document(source: TokenSource) -> TokenSource:
    """Return the documents of a source as rows: itself, if each is a row already."""
    counts = np.diff(source.documents)
    return source if (counts == 1).all() else DocumentSource(source)


class DocumentSource:
    """The documents of a source as rows, each of which may be of many sentences."""

    row_name = "document"

    def __init__(self, source: TokenSource) -> None:
        self._source = source
        self.name = source.name
        self.prefix = source.prefix
        self._starts = np.zeros(len(source.sequence_lengths) + 1, dtype=np.int64)
        np.cumsum(source.sequence_lengths, out=self._starts[1:])  # of the source's rows
        self._bounds = self._starts[source.documents]
        self.sequence_lengths = np.diff(self._bounds)
        self.documents = np.arange(len(self.sequence_lengths) + 1, dtype=np.int64)

    def join(self, rows: npt.NDArray[Any], first: int, last: int) -> Tokens:
        begins, ends = self._bounds[rows], self._bounds[rows + 1]
        begins[0] += first
        ends[-1] += last - self.sequence_lengths[rows[-1]]
        parts = [
            self._range(begin, end)
            for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)
            if begin < end
        ]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def _range(self, begin: int, end: int) -> Tokens:
        """Return tokens of the source, one row after the other; at least one."""
        first = int(np.searchsorted(self._starts, begin, side="right")) - 1
        last = int(np.searchsorted(self._starts, end, side="left")) - 1
        rows = np.arange(first, last + 1)
        starts = self._starts[[first, last]].tolist()
        return self._source.join(rows, begin - starts[0], end - starts[1])
