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
MOCK_LONGEST = 4096

Tokens = npt.NDArray[np.int64]


class TokenSource(Protocol):
    """Rows of tokens by number."""

    @property
    def name(self) -> str:
        """What to call it in a message."""

    @property
    def sequence_lengths(self) -> npt.NDArray[np.int32]:
        """Tokens of each row."""

    def join(self, rows: npt.NDArray[Any], first: int, last: int) -> Tokens:
        """Return the tokens of ``rows``, one after the other.

        Args:
            rows: numbers of the rows.
            first: tokens to leave out at the start of the first row.
            last: tokens to take of the last row, counted from its start.
        """


class FileSource:
    """The sequences of a ``.bin``/``.idx`` pair."""

    def __init__(self, prefix: str, *, mmap: bool = True) -> None:
        self.dataset = IndexedDataset(prefix, mmap=mmap)
        self.name = prefix
        self.sequence_lengths = self.dataset.sequence_lengths
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

    def __init__(self, vocab_size: int, eod: int) -> None:
        self.vocab_size = vocab_size
        self.eod = eod
        self.sequence_lengths = np.random.default_rng(0).integers(
            1, MOCK_LONGEST, MOCK_ROWS, dtype=np.int32
        )

    def join(self, rows: npt.NDArray[Any], first: int, last: int) -> Tokens:
        counts = self.sequence_lengths[rows].astype(np.int64)
        ends = np.cumsum(counts)
        tokens: Tokens = np.arange(1, int(ends[-1]) + 1) - np.repeat(ends - counts, counts)
        tokens %= self.vocab_size
        tokens[ends - 1] = self.eod
        stop = int(ends[-1]) - int(counts[-1]) + last
        return tokens[first:stop]
