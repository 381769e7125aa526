"""What one rank sees of a microbatch, in bytes, and the regions that its layers save in.

A region lists the pieces of memory that autograd saves there; the same piece may stand in several.
`saved` and `saved_channels` make the regions of each kind of block.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from megatron.core.optimizer.memory import BYTES
from megatron.training.config import RunConfig
from megatron.training.plan.attention_bytes import Piece


@dataclass(frozen=True)
class Share:
    """What one rank sees of a microbatch of ``samples``."""

    config: RunConfig
    samples: int
    length: int | None = None
    """Positions of a sample's text; of the first one when absent."""

    def of(self, length: int) -> "Share":
        """Return the same of a text of so many positions."""
        return replace(self, length=length)

    @cached_property
    def positions(self) -> int:
        """Positions of a sample's text on all ranks."""
        return self.config.data.seq_length if self.length is None else self.length

    @cached_property
    def tp(self) -> int:
        """Tensor-parallel ranks."""
        return self.config.parallel.tensor_model_parallel_size

    @cached_property
    def tokens(self) -> int:
        """Tokens inside attention and MLP."""
        parallel = self.config.parallel
        return self.samples * (self.positions // parallel.context_parallel_size)

    @cached_property
    def outer(self) -> int:
        """Tokens between them: less with sequence parallelism."""
        return self.samples * (self.positions // self.config.sequence_shares)

    @cached_property
    def size(self) -> int:
        """Bytes of an activation's element."""
        return BYTES[self.config.precision.params_dtype]

    @cached_property
    def main(self) -> int:
        """Bytes of an element of sums."""
        return BYTES[self.config.precision.accumulation_dtype]

    @cached_property
    def exponentials(self) -> int:
        """Bytes of an exponential of a logit."""
        return self.size if self.config.model.fp16_lm_cross_entropy else self.main

    @cached_property
    def wide(self) -> int:
        """Bytes of an element of the residual stream."""
        return BYTES[self.config.residual_dtype]

    @cached_property
    def normed(self) -> Piece:
        """What a norm gives to its block."""
        return Piece("normed", self.stream, self.size)

    @cached_property
    def residual(self) -> int:
        """Bytes of the hidden states between blocks."""
        return self.outer * self.config.model.hidden_size * self.wide

    @cached_property
    def stream(self) -> int:
        """Bytes of the hidden states that a block is given by its norm."""
        return self.outer * self.config.model.hidden_size * self.size

    @cached_property
    def output(self) -> int:
        """Bytes of a block's output before ranks share it: a gradient that is put off holds it."""
        return self.tokens * self.config.model.hidden_size * self.size

    @cached_property
    def masks(self) -> int:
        """Bytes of a dropout mask of hidden states."""
        model = self.config.model
        return self.outer * model.hidden_size if model.hidden_dropout else 0

    def row(self, size: int) -> int:
        """Return the bytes that a norm saves for a row of elements of ``size`` bytes."""
        if self._vectors == 1:
            return self.main
        # On the CPU torch keeps mean and deviation in the dtype of the input.
        return 2 * (size if self.config.process.device == "cpu" else self.main)

    @cached_property
    def _vectors(self) -> int:
        """Gains, and shifts where a norm has them."""
        return 2 if self.config.model.norm.normalization == "LayerNorm" else 1

    def norm(self, of: str = "stream") -> tuple[Piece, ...]:
        """Return what a norm of hidden states saves: its input, and its rows' statistics.

        Of gains it saves a copy where the residual stream has another dtype than they have.
        """
        row, count = self.row(self.wide), self._vectors
        statistics = [
            Piece(f"statistic {i} of {of}", self.outer * row // count, row // count)
            for i in range(count)
        ]
        hidden = self.config.model.hidden_size
        gains = [
            Piece(f"gains {i} of {of}", hidden * self.wide, self.wide)
            for i in range(count)
            if self.wide != self.size
        ]
        return (Piece(of, self.residual, self.wide), *statistics, *gains)

    def inner_norm(self, name: str, elements: int, rows: int) -> tuple[Piece, ...]:
        """Return what a norm within a block saves."""
        row, count = self.row(self.size), self._vectors
        statistics = (
            Piece(f"statistic {i} of {name}", rows * row // count, row // count)
            for i in range(count)
        )
        return (Piece(name, elements * self.size, self.size), *statistics)


@dataclass(frozen=True)
class Region:
    """A part of a sub-layer that runs, is recomputed or is offloaded as one."""

    name: str
    saved: tuple[Piece, ...]
    late: int = 0
    """Bytes that its weights' gradients hold on to when they are put off."""
    inputs: tuple[Piece, ...] = ()
    """What it keeps when it is recomputed."""
    outputs: tuple[Piece, ...] = ()
    """What it can make again for those who save it."""
    recomputed: str = ""
    """Its name in --recompute-modules."""
    offloaded: str = ""
    """Its name in --offload-modules."""
    joins: bool = False
    """It is offloaded in one group with the region before it."""
    sends: bool = False
    """Rows leave after it; its backward waits for their gradients."""
    awaits: bool = False
    """It waits for rows that were sent."""
