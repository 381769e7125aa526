"""The fullest moments of one rank: of activations, of communication, and of both together.

Each chunk of the rank says what a microbatch keeps (`ledger`) and what a backward has for
communication (`passing`); a schedule says which microbatches are alive before each backward.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from megatron.training.plan.ledger import Footprint, beside
from megatron.training.plan.passing import Passing
from megatron.training.plan.pipeline import Alive


class Peak(NamedTuple):
    """Bytes of what comes and goes, each at most."""

    activations: int
    host: int
    """Activations in host memory."""
    communication: int
    together: int
    """Activations and communication at one time."""


class Later(NamedTuple):
    """Bytes for communication once backwards are done."""

    copies: Sequence[int]
    """Of each chunk's gradients, as they travel."""
    moment: int
    """Of what is packed then."""
    overlaps: bool
    """Gradients of one chunk travel while other chunks have backwards to come."""


class Chunk(NamedTuple):
    """What one chunk has, by microbatch and by backward."""

    activations: Footprint
    passing: Passing


def evaluation(chunks: Iterable[Chunk]) -> Peak:
    """Return the peak of forwards alone."""
    working, most = (
        max(numbers)
        for numbers in zip(*((c.activations.working, c.passing.most) for c in chunks), strict=True)
    )
    return Peak(working, 0, most, working + most)


def training(moments: Iterable[Alive], chunks: Sequence[Chunk], later: Later) -> Peak:
    """Return the peak of an iteration, given the moments that may be its fullest."""
    found = [_Moment(moment, chunks) for moment in moments]
    copies, in_the_end = _copies(later, [chunk.activations.kept for chunk in chunks])
    return Peak(
        max(moment.activations() for moment in found),
        max(moment.host() for moment in found),
        max(later.moment, copies, *(moment.communication() for moment in found)),
        max(later.moment, in_the_end, *(moment.together() for moment in found)),
    )


class _Moment:
    """A backward, or the second part of one, that is about to begin."""

    def __init__(self, moment: Alive, chunks: Sequence[Chunk]) -> None:
        self._moment, self._chunks = moment, chunks
        self._here = chunks[moment.chunk]
        self._finds_gradients = moment.begun[moment.chunk]
        self._working = max(chunk.activations.working for chunk in chunks)
        held = zip(moment.kept, moment.postponed, chunks, strict=True)
        self._alive = sum(
            kept * chunk.activations.kept + late * chunk.activations.postponed
            for kept, late, chunk in held
        )
        self._pair = None if moment.beside is None else self._of_pair(chunks[moment.beside])
        # Gradients that other chunks have between the two parts of a backward.
        self._waiting = sum(
            chunk.passing.gradients
            for number, (is_begun, chunk) in enumerate(zip(moment.begun, chunks, strict=True))
            if is_begun and number != moment.chunk
        )

    def _of_pair(self, forward: Chunk) -> int:
        """Return the most of a pair, and of what is alive beside it."""
        ahead, back = forward.activations, self._here.activations
        before = self._alive - ahead.kept  # a forward has just ended, and no pair has begun
        return before + max(self._working, beside(ahead, back) - back.kept)

    def activations(self) -> int:
        if self._moment.is_second:
            return self._alive
        if self._pair is not None:
            return self._pair
        return self._alive + max(self._working, self._here.activations.backward)

    def host(self) -> int:
        held = zip(self._moment.kept, self._chunks, strict=True)
        return sum(kept * chunk.activations.host for kept, chunk in held)

    def communication(self) -> int:
        passing = self._here.passing
        if self._moment.is_second:
            return self._waiting + passing.end
        if self._finds_gradients:
            return self._waiting + max([passing.end, *passing.later.values()])
        return self._waiting + passing.most

    def together(self) -> int:
        before = self._alive + self._waiting
        if self._moment.is_second:
            return before + self._here.passing.end
        if self._pair is not None:
            return self._pair + self.communication()
        both = self._here.activations.together[self._finds_gradients]
        return before + max(self._working, both)


def _copies(later: Later, kept: Sequence[int]) -> tuple[int, int]:
    """Return the most that gradients take as they travel, and the most with activations.

    Without overlap they are sent chunk by chunk, when all is done. With it the last chunk's stay
    while the last backwards of those before it go on.
    """
    if not later.overlaps:
        return max(later.copies), max(later.copies)
    sent = [*accumulate(reversed(later.copies))]
    alive = [*accumulate(kept)][::-1][1:]
    return sent[-1], max(a + b for a, b in zip(sent, [*alive, 0], strict=True))
