"""Where the tokens of a sample come from: which documents of which corpus, and where in them."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.bert import BertDataset
from megatron.core.datasets.blended import BlendedDataset, Dataset, Member
from megatron.core.datasets.source import FileSource, TokenSource
from megatron.core.datasets.t5 import T5Dataset

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
    encoder: Tokens | None = None
    """What an encoder is given, without padding."""
    target: Tokens | None = None
    """What is to be said by its decoder or, where it is alone, at its masked places; `tokens` are
    the text that both are made of."""
    has_decoder: bool = False

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
    sample, pieces = dataset[i], list(_pieces(dataset, i))
    name, counted = dataset.source.name, int(np.count_nonzero(sample["loss_mask"]))
    if isinstance(dataset, T5Dataset):
        return Trace(
            source=name,
            number=i,
            pieces=pieces,
            tokens=dataset.text(i),
            counted=counted,
            encoder=sample["encoder_tokens"][sample["encoder_valid"]],
            target=sample["labels"][sample["loss_mask"] > 0],
            has_decoder=True,
        )
    if isinstance(dataset, BertDataset):
        return Trace(
            source=name,
            number=i,
            pieces=pieces,
            tokens=dataset.text(i),
            counted=counted,
            encoder=sample["tokens"][: int(sample["cu_seqlens"][1])],
            target=sample["labels"][sample["loss_mask"] > 0],
        )
    tokens = np.append(sample["tokens"], sample["labels"][-1])
    return Trace(source=name, number=i, pieces=pieces, tokens=tokens, counted=counted)


def _pieces(dataset: Member, i: int) -> Iterator[Piece]:
    source = dataset.source
    for row, start, end in dataset.places(i):
        if start == end:  # an empty row
            continue
        document, before, length = _document_of(source, row)
        tokens = source.join(np.array([row]), start, end)
        yield Piece(document=document, first=before + start, length=length, tokens=tokens)


def _document_of(source: TokenSource, row: int) -> tuple[int, int, int]:
    """Return (document, tokens of it before the row, tokens of it) of a row."""
    lengths = source.sequence_lengths
    if not isinstance(source, FileSource):
        return row, 0, int(lengths[row])
    bounds = source.documents
    document = int(np.searchsorted(bounds, row, side="right")) - 1
    start, end = bounds[document : document + 2].tolist()
    before, length = (int(lengths[start:stop].sum(dtype=np.int64)) for stop in (row, end))
    return document, before, length
