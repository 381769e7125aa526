"""Which sentences make up sample ``i`` of a masked data set: one array, equal to Megatron-core's.

The sequences of a corpus are sentences, or whole documents where nobody split them. A sample is a
run of sentences of one document: they are taken until a target length is reached, and what goes
beyond it is cut off when the sample is read. The target is the room that a sample has or, once in
``round(1 / short_seq_prob)`` times, a length drawn between 2 and the room, so that a model also
sees short inputs. A last sentence that would be left alone is taken along. Samples of as many
epochs as are needed are shuffled all together:

    sample index [N, 3]      first piece, piece after the last one, target length
    epoch index  [E + 1]     how many samples the epochs before have

What is no sentence of normal length is cut or left out, where Megatron-core drops a whole document:
a sequence longer than the room becomes pieces of that length, each of which can be a sample (or a
sentence of one, where a sample needs two), and an empty one becomes none. Pieces are numbered over
the whole corpus; without such sequences a piece is a sequence.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.draws import permutation64, words
from megatron.core.datasets.gpt import Place
from megatron.core.datasets.samples import INT32_MAX, MOST_ENTRIES
from megatron.core.datasets.source import TokenSource
from megatron.core.utils import UserError

SHORTEST = 2
"""Tokens of the shortest target."""


class MaskedIndex(NamedTuple):
    """The two arrays; see the module's docstring."""

    sample: npt.NDArray[Any]
    epoch: npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class MaskedPlan:
    """How sentences are joined to samples."""

    room: int
    """Tokens that a sample has room for."""
    short_seq_prob: float
    seed: int
    asked: int | None
    """Samples wanted; None for one epoch."""
    min_sentences: int = 1
    """Sentences that a sample needs; documents of fewer are left out."""


class Pieces:
    """The sequences of a corpus, long ones cut.

    Args:
        lengths: tokens of each sequence.
        room: tokens of a piece at most.
    """

    def __init__(self, lengths: npt.NDArray[Any], room: int) -> None:
        self.room = room
        self._lengths = lengths
        self._bounds: npt.NDArray[np.int64] | None = None
        """First piece of each sequence, and the number of all; None where each is one piece."""
        if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= room:
            self._bounds = np.zeros(len(lengths) + 1, dtype=np.int64)
            np.cumsum(-(-lengths.astype(np.int64) // room), out=self._bounds[1:])

    def __len__(self) -> int:
        return len(self._lengths) if self._bounds is None else int(self._bounds[-1])

    def first(self, sequences: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the first piece of each of the sequences, or of what follows them."""
        return sequences if self._bounds is None else self._bounds[sequences]

    def place(self, piece: int) -> Place:
        """Return (sequence, first token in it, token after the last) of a piece."""
        if self._bounds is None:
            return piece, 0, int(self._lengths[piece])
        sequence = int(np.searchsorted(self._bounds, piece, side="right")) - 1
        start = (piece - int(self._bounds[sequence])) * self.room
        return sequence, start, min(start + self.room, int(self._lengths[sequence]))

    def sizes(self, first: int, last: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return (tokens, whether it is of a sequence that was cut) of the pieces of sequences.

        Args:
            first: the first sequence.
            last: the sequence after the last one.
        """
        here = self._lengths[first:last].astype(np.int64)
        if self._bounds is None:
            return here, np.zeros(len(here), dtype=bool)
        counts = np.diff(self._bounds[first : last + 1])
        sizes = np.full(int(counts.sum()), self.room, dtype=np.int64)
        filled = counts > 0
        ends = np.cumsum(counts)[filled] - 1
        sizes[ends] = (here - (counts - 1) * self.room)[filled]
        return sizes, np.repeat(counts > 1, counts)


def build_masked_index(
    pieces: Pieces, documents: npt.NDArray[np.int64], plan: MaskedPlan
) -> MaskedIndex:
    """Return the samples of one split: whole epochs, so at least as many as are asked for.

    Args:
        pieces: those of the whole corpus.
        documents: bounds of the split's documents, as numbers of sequences.
        plan: how sentences are joined.

    Raises:
        UserError: no document has enough sentences, or there are more samples than memory holds.
    """
    try:
        if plan.asked is not None and plan.asked > MOST_ENTRIES:
            raise MemoryError
        return _walked(_Walk(pieces, documents, plan), plan, len(pieces) > INT32_MAX)
    except MemoryError:
        raise UserError(
            f"the order of {plan.asked or 0:,} samples (of the run's length, or of its "
            "evaluations) does not fit into memory; lower --train-iters or --train-samples, or "
            "--eval-iters, or --global-batch-size"
        ) from None


def _walked(walk: "_Walk", plan: MaskedPlan, wide: bool) -> MaskedIndex:
    targets = _targets(plan)
    parts = [np.empty((0, 3), dtype=np.int64 if wide else np.int32)]
    ends = [0]
    while len(ends) == 1 or (plan.asked is not None and ends[-1] < plan.asked):
        rows = walk.epoch(targets)
        if not rows:
            raise _no_samples(walk, plan)
        parts.append(np.array(rows, dtype=parts[0].dtype))
        ends.append(ends[-1] + len(rows))
    sample = np.concatenate(parts)
    order = permutation64(len(sample), plan.seed + 1)
    return MaskedIndex(sample[order], np.array(ends, dtype=np.int64))


def _targets(plan: MaskedPlan) -> Iterator[int]:
    """Yield target lengths: each from one draw, when short samples are wanted at all."""
    if plan.short_seq_prob == 0:
        while True:
            yield plan.room
    ratio = round_half_up(1 / plan.short_seq_prob)
    for word in words(plan.seed):
        yield SHORTEST + word % (plan.room - 1) if word % ratio == 0 else plan.room


def round_half_up(x: float) -> int:
    """Return the nearest whole number as C's ``round`` does, of two the greater one."""
    return int(np.floor(x + 0.5))


class _Walk:
    """The documents of a split with enough sentences, ready to be walked again and again."""

    def __init__(self, pieces: Pieces, documents: npt.NDArray[np.int64], plan: MaskedPlan) -> None:
        self.least = plan.min_sentences
        first, last = int(documents[0]), int(documents[-1])
        sizes, is_cut = pieces.sizes(first, last)
        self._ends = np.cumsum(sizes)
        bounds = pieces.first(documents)
        self._offset = int(bounds[0])
        """Number of the split's first piece in the corpus."""
        bounds = bounds - self._offset
        counts = np.diff(bounds)
        self.documents, self.empty = len(counts), int(np.count_nonzero(counts == 0))
        usable = counts >= max(1, self.least)
        starts, stops = bounds[:-1][usable], bounds[1:][usable]
        self._usable = np.stack([starts, stops, is_cut[stops - 1]], axis=1)
        """First piece, the one after the last, and whether that is of a sequence that was cut."""

    def epoch(self, targets: Iterator[int]) -> list[tuple[int, int, int]]:
        """Return the samples of one pass over the documents, in their order."""
        offset, least = self._offset, self.least
        rows = []
        for first, stop, ends_cut in self._usable.tolist():
            ends = self._ends[first:stop].tolist()
            start, before = 0, int(self._ends[first - 1]) if first else 0
            last = stop - first - 1
            target = next(targets)
            while start <= last:
                # The piece with which the target is reached, if there are enough by then.
                end = bisect_left(ends, before + target, start)
                end = max(end, start + least - 1)
                if end >= last or (end == last - 1 and (least > 1 or not ends_cut)):
                    end = last
                rows.append((offset + first + start, offset + first + end + 1, target))
                start, before = end + 1, ends[end]
                target = next(targets)  # drawn, though not used, at the end of a document too
        return rows


def _no_samples(walk: _Walk, plan: MaskedPlan) -> UserError:
    short = walk.documents - walk.empty
    return UserError(
        f"none of {walk.documents} documents gives a sample, which takes {plan.min_sentences} or "
        f"more sentences: {walk.empty} are empty and {short} have fewer; make the corpus with "
        "tools/preprocess_data.py --split-sentences, or give other documents"
    )


class SentenceTexts:
    """The samples' texts: sentences of one document, cut off at the target length or whole."""

    def __init__(
        self,
        source: TokenSource,
        pieces: Pieces,
        index: MaskedIndex,
        description: dict[str, Any] | None = None,
    ) -> None:
        self.source = source
        self.index = index
        self.description = description or {}
        self._pieces = pieces

    def __len__(self) -> int:
        return len(self.index.sample)

    @property
    def samples_per_epoch(self) -> float:
        """Samples in one pass over the documents, on average."""
        return len(self) / (len(self.index.epoch) - 1)

    def text(self, i: int) -> npt.NDArray[np.int64]:
        """Return the tokens of text ``i``, at least one."""
        return self.whole(i)[: self.target(i)]

    def places(self, i: int) -> Iterator[Place]:
        """Yield where the tokens of text ``i`` stand, row by row."""
        left = self.target(i)
        for row, start, end in self.whole_places(i):
            end = min(end, start + left)
            yield row, start, end
            left -= end - start
            if not left:
                return

    def whole(self, i: int) -> npt.NDArray[np.int64]:
        """Return the sentences of text ``i``, not cut off."""
        (row, first, _), (last_row, _, last) = self._ends(i)
        return self.source.join(np.arange(row, last_row + 1), first, last)

    def whole_places(self, i: int) -> Iterator[Place]:
        """Yield where the sentences of text ``i`` stand, row by row."""
        (row, first, _), (last_row, _, last) = self._ends(i)
        for here in range(row, last_row + 1):
            start = first if here == row else 0
            yield here, start, last if here == last_row else int(self.source.sequence_lengths[here])

    def cuts(self, i: int) -> npt.NDArray[np.int64]:
        """Return where in the whole of text ``i`` its sentences begin, but for the first."""
        first, last, _ = self.index.sample[i].tolist()
        places = map(self._pieces.place, range(first, last - 1))
        return np.cumsum([end - start for _, start, end in places], dtype=np.int64)

    def target(self, i: int) -> int:
        """Return the tokens that text ``i`` is to have at most."""
        return int(self.index.sample[i, 2])

    def _ends(self, i: int) -> tuple[Place, Place]:
        """Return the places of the first and last pieces of a text."""
        first, last, _ = self.index.sample[i].tolist()
        return self._pieces.place(first), self._pieces.place(last - 1)
