"""Where the stages of a pipeline live: which rank holds which, and as which of its chunks.

A model is cut into stages, numbered by position from the embedding (0) to the head. A rank holds
one or several of them, its chunks:

    loop, 4 ranks, 2 chunks    rank 0: 0 4   rank 1: 1 5   rank 2: 2 6   rank 3: 3 7
    v, 4 ranks, 2 chunks       rank 0: 0 7   rank 1: 1 6   rank 2: 2 5   rank 3: 3 4

In a V both ends of the model are on rank 0, and the hop at its turn stays on the last rank.

In this package a *rank* is a coordinate along the pipeline's axis, 0 to its size - 1, never a
number in the whole world: `comm` alone knows the processes behind it, by `Axis.ranks`.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Placement:
    """The stages of a pipeline over ``num_ranks`` ranks."""

    num_ranks: int
    num_chunks: int = 1
    shape: Literal["loop", "v"] = "loop"

    def __post_init__(self) -> None:
        assert self.num_ranks >= 1 and self.num_chunks >= 1, self
        assert self.shape == "loop" or self.num_chunks == 2, f"a V has two chunks: {self}"

    @property
    def num_stages(self) -> int:
        """Return the number of stages over all ranks."""
        return self.num_ranks * self.num_chunks

    def position(self, rank: int, chunk: int) -> int:
        """Return the stage that a rank holds as its ``chunk``."""
        if self.shape == "v" and chunk == 1:
            return self.num_stages - 1 - rank
        return chunk * self.num_ranks + rank

    def owner(self, position: int) -> tuple[int, int]:
        """Return the (rank, chunk) that holds a stage."""
        chunk, rank = divmod(position, self.num_ranks)
        if self.shape == "v" and chunk == 1:
            rank = self.num_ranks - 1 - rank
        return rank, chunk

    def positions(self, rank: int) -> list[int]:
        """Return the stages of a rank, by chunk."""
        return [self.position(rank, chunk) for chunk in range(self.num_chunks)]
