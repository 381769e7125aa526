"""Encoding a block: records in, arrays of token ids out. This is what worker processes run."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.preprocess.reading import Block
from megatron.core.datasets.preprocess.records import Parser, Problem, Record, Value
from megatron.core.datasets.preprocess.sentences import Splitter
from megatron.core.utils import UserError

FIRST_PROBLEMS = 10
"""Problems of each kind that are kept with their place; the others are counted."""

Array = npt.NDArray[Any]


class Tokenizer(Protocol):
    """What preprocessing needs of a tokenizer."""

    kind: str
    vocab_size: int

    @property
    def eod(self) -> int | None:
        """Id that ends a document."""

    def encode_batch(self, texts: Sequence[str], num_threads: int = 1) -> Sequence[Any]:
        """Return the ids of each text."""

    def fingerprint(self) -> str:
        """Return a hash of all that decides ids."""

    def without_sentinels(self) -> str:
        """Return a hash of all that decides the ids of texts."""


@dataclass(frozen=True)
class Documents:
    """Encoded documents of one key; see `IndexedDatasetBuilder.add_documents`."""

    tokens: Array
    lengths: Array
    sequences: Array


@dataclass
class Encoded:
    """What became of a block."""

    documents: list[Documents] = field(default_factory=list)
    """One item per key, with the same number of documents in each."""
    read: int = 0
    kept: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    problems: list[Problem] = field(default_factory=list)
    """The first ones of each kind, in the order of the input."""

    def add(self, problem: Problem) -> None:
        """Count a record that is not used."""
        self.skipped[problem.kind] += 1
        if self.skipped[problem.kind] <= FIRST_PROBLEMS:
            self.problems.append(problem)


@dataclass(frozen=True)
class Encoder:
    """Turns blocks into token arrays.

    A document whose every key gives no token is skipped as empty; when only some keys are empty,
    these get a document without sequences, so that the keys' documents stay aligned.
    """

    tokenizer: Tokenizer
    parser: Parser
    splitter: Splitter | None = None
    """Cuts texts into sentences, each a sequence of its own."""
    append_eod: bool = False

    def __call__(self, block: Block) -> Encoded:
        """Return the documents of a block and what was wrong with the others."""
        result = Encoded()
        records: list[Record] = []
        for item in self.parser.parse(block):
            result.read += 1
            if isinstance(item, Problem):
                result.add(item)
            else:
                records.append(item)
        records, columns = self._encode(block, records, result)
        used = np.zeros(len(records), bool)
        for column in columns:
            used |= column.sequences > 0
        for i in np.flatnonzero(~used):
            unit = "row" if block.kind == "rows" else "line"
            detail = "the text is empty" if len(columns) == 1 else "the texts are all empty"
            result.add(Problem("empty", block.path, records[i].line, detail, unit))
        result.problems.sort(key=lambda problem: problem.line)
        result.kept = int(used.sum())
        result.documents = [
            Documents(column.tokens, column.lengths, column.sequences[used]) for column in columns
        ]
        return result

    def _encode(
        self, block: Block, records: list[Record], result: Encoded
    ) -> tuple[list[Record], list[Documents]]:
        """Return the records that could be encoded and their documents per key."""
        keys = range(len(self.parser.keys))
        try:
            return records, [self._column([r.values[k] for r in records]) for k in keys]
        except UserError:
            # One text in a thousand cannot be encoded: find it, and keep the others.
            good = []
            for record in records:
                try:
                    for value in record.values:
                        self._column([value])
                    good.append(record)
                except UserError as error:
                    unit = "row" if block.kind == "rows" else "line"
                    result.add(Problem("not-encodable", block.path, record.line, str(error), unit))
            return good, [self._column([r.values[k] for r in good]) for k in keys]

    def _column(self, values: list[Value]) -> Documents:
        """Return the documents of one key."""
        texts: list[str] = []
        counts = np.ones(len(values), np.int64)
        if self.splitter is None and all(isinstance(value, str) for value in values):
            texts = values  # type: ignore[assignment]
        else:
            for i, value in enumerate(values):
                pieces = self._sentences(value)
                counts[i] = len(pieces)
                texts += pieces
        ids = self.tokenizer.encode_batch(texts, 1) if texts else []
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        tokens = _joined(ids, int(lengths.sum()))
        document = np.repeat(np.arange(len(values)), counts)[lengths > 0]
        lengths = lengths[lengths > 0]
        sequences = np.bincount(document, minlength=len(values))
        if self.append_eod and len(lengths):
            assert self.tokenizer.eod is not None
            last = np.append(document[1:] != document[:-1], True)
            ends = np.cumsum(lengths)
            tokens = np.insert(tokens, ends[last], self.tokenizer.eod)
            lengths = lengths + last
        return Documents(tokens, lengths, sequences)

    def _sentences(self, value: Value) -> list[str]:
        if self.splitter is None:
            return [value] if isinstance(value, str) else value
        pieces = [value] if isinstance(value, str) else value
        return [sentence for piece in pieces for sentence in self.splitter(piece)]


def _joined(ids: Sequence[Any], total: int) -> Array:
    """Return all ids in one array, wide enough for any id: the writer checks before it narrows."""
    if ids and all(isinstance(item, np.ndarray) for item in ids):
        joined = np.concatenate(ids)
        return joined.astype(np.promote_types(joined.dtype, np.int32), copy=False)
    return np.fromiter(chain.from_iterable(ids), np.int32, total)
