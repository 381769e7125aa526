"""Where the tokens of a sample come from: which documents of which corpus, and where in them."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.blended import BlendedDataset, Dataset
from megatron.core.datasets.gpt import GPTDataset
from megatron.core.datasets.source import FileSource

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What a sample takes of one row of a corpus."""

    document: int
    """Number of the document that the row is of."""
    first: int
    """Place of the first token taken, in the document."""
    length: int
    """Tokens of the whole document."""
    tokens: Tokens

    @property
    def end(self) -> int:
        """Return the place after the last token taken, in the document."""
        return self.first + len(self.tokens)


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One sample, taken apart."""

    source: str
    """Prefix of the corpus."""
    number: int
    """Number of the sample among those of its corpus."""
    pieces: list[Piece]
    """In reading order; together the tokens of the sample, and those for its labels."""
    tokens: Tokens
    """What the model is given: inputs and the last label."""
    counted: int
    """Tokens at which loss is taken."""

    @property
    def is_rearranged(self) -> bool:
        """Return whether the model sees something else than the pieces, one after the other."""
        read = np.concatenate([piece.tokens for piece in self.pieces])
        return not np.array_equal(read, self.tokens[: len(read)])


def trace(dataset: Dataset, i: int) -> Trace:
    """Return where sample ``i`` of a data set comes from."""
    if isinstance(dataset, BlendedDataset):
        member = dataset.members[int(dataset.index[0][i])]
        return trace(member, int(dataset.index[1][i]))
    sample = dataset[i]
    return Trace(
        source=dataset.source.name,
        number=i,
        pieces=list(_pieces(dataset, i)),
        tokens=np.append(sample["tokens"], sample["labels"][-1]),
        counted=int(np.count_nonzero(sample["loss_mask"])),
    )


def _pieces(dataset: GPTDataset, i: int) -> Iterator[Piece]:
    source, index = dataset.source, dataset.index
    place = int(index.shuffle[i])
    (first_row, first), (last_row, last) = index.sample[place : place + 2].tolist()
    for position in range(first_row, last_row + 1):
        row = int(index.document[position])
        start = first if position == first_row else 0
        end = int(source.sequence_lengths[row])
        if position == last_row:
            end = last + dataset.options.extra
        if start == end:  # an empty row
            continue
        document, before, length = _document_of(dataset, row)
        tokens = source.join(np.array([row]), start, end)
        yield Piece(document=document, first=before + start, length=length, tokens=tokens)


def _document_of(dataset: GPTDataset, row: int) -> tuple[int, int, int]:
    """Return (document, tokens of it before the row, tokens of it) of a row."""
    lengths = dataset.source.sequence_lengths
    if not isinstance(dataset.source, FileSource):
        return row, 0, int(lengths[row])
    bounds = dataset.source.dataset.document_indices
    document = int(np.searchsorted(bounds, row, side="right")) - 1
    start, end = bounds[document : document + 2].tolist()
    before, length = (int(lengths[start:stop].sum(dtype=np.int64)) for stop in (row, end))
    return document, before, length
