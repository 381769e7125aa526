"""Master weights: the optimizer's own copy of parameters that are too coarse to be updated.

bf16 has 8 bits of mantissa, so a step of less than 1/256 of a weight would be lost. A `Shard` of
bf16 parameters holds fp32 masters, updates those and rounds them into the parameters; fp32 and fp64
parameters are updated in place and cost no copy.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from megatron.core.distributed import layout
from megatron.core.distributed.buffers import FlatBuffer
from megatron.core.distributed.layout import Range


class Shard:
    """The contiguous range of one flat buffer that this rank updates, and its optimizer state."""

    def __init__(
        self, buffer: FlatBuffer, span: Range, state_names: Iterable[str], main_dtype: torch.dtype
    ) -> None:
        self.buffer, self.span = buffer, span
        start, stop = span
        self.parameters = buffer.data[start:stop]
        self.has_masters = self.parameters.dtype != main_dtype
        self.main = self.parameters.to(main_dtype) if self.has_masters else self.parameters
        self.grad = buffer.grad[start:stop]
        assert self.grad.dtype == main_dtype, f"{self.grad.dtype} gradients, {main_dtype} weights"
        self.state: dict[str, Tensor] = {name: torch.zeros_like(self.main) for name in state_names}

    def segments(self) -> list[tuple[str, slice]]:
        """Return (group, slice of this shard) of each optimizer group in it."""
        found = []
        for group, segment in self.buffer.plan.segments:
            common = layout.intersect(segment, self.span)
            if common is not None:
                found.append((group, slice(common[0] - self.span[0], common[1] - self.span[0])))
        return found

    def cut(self, ranges: Iterable[Range]) -> list[slice]:
        """Return the parts of the buffer's ``ranges`` that lie in this shard, as its slices."""
        common = [layout.intersect(each, self.span) for each in ranges]
        start = self.span[0]
        return [slice(part[0] - start, part[1] - start) for part in common if part is not None]

    def publish(self) -> None:
        """Round the masters into the parameters."""
        if self.has_masters:
            self.parameters.copy_(self.main)
