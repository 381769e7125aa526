"""The vocabulary, cut over the tensor-parallel axis by rows.

Rows are padded so that every rank holds equally many. Padding rows lie in no region of the record:
they stay zero, are never stored, and the cross entropy gives them neither probability nor gradient.

Shapes: S sequence, B batch, H hidden, V padded vocabulary; lower case is this rank's share.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core import sharding
from megatron.core.mesh import Mesh
from megatron.core.sharding import Init, Region, Sharding
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.layers import make_parameter
from megatron.core.utils import divide


class VocabularyRows:
    """Which rows of the vocabulary this rank holds.

    >>> from megatron.core.mesh import Mesh
    >>> VocabularyRows(1000, 1024, Mesh.serial()).valid
    1000
    """

    def __init__(self, vocab_size: int, padded_vocab_size: int, mesh: Mesh) -> None:
        self.vocab_size = vocab_size
        self.count = divide(padded_vocab_size, mesh.tp.size)
        self.start = mesh.tp.coordinate * self.count
        self.valid = min(max(vocab_size - self.start, 0), self.count)
        """Leading local rows that are no padding."""

    def record(self, hidden_size: int, init: Init) -> Sharding:
        """Return the record of a matrix with one row per token."""
        columns = (0, hidden_size)
        region = Region(
            ((0, self.valid), columns), ((self.start, self.start + self.valid), columns)
        )
        regions = (region,) if self.valid else ()
        return Sharding((self.vocab_size, hidden_size), regions, init, embedding=True)


class _Lookup(torch.autograd.Function):
    """Rows of a matrix; the gradient is added row by row, without a matrix of zeros."""

    @staticmethod
    def forward(ctx: Any, weight_vH: Tensor, rows: Tensor) -> Tensor:
        assert sharding.is_there(weight_vH), "a unit of the model was not called as a module"
        ctx.save_for_backward(rows)
        ctx.weight_vH = weight_vH  # hooks on saved tensors would give back one without a buffer
        return weight_vH[rows]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        (rows,) = ctx.saved_tensors
        weight_vH = ctx.weight_vH
        grad = grads[0].flatten(0, -2)
        target = weight_vH.grad
        if target is None:
            target = torch.zeros_like(weight_vH)
        target.index_add_(0, rows.flatten(), grad.to(target.dtype))
        if weight_vH.grad is None:
            return target, None
        return None, None


class VocabParallelEmbedding(nn.Module):
    """Token vectors ``x_SBH`` of ``tokens_BS``; each rank looks up the rows it holds."""

    def __init__(
        self,
        rows: VocabularyRows,
        hidden_size: int,
        init: Init,
        mesh: Mesh,
        dtype: torch.dtype,
        *,
        sequence_parallel: bool = False,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.rows = rows
        self.axis = mesh.tp
        self.sequence_parallel = sequence_parallel
        shape = (rows.count, hidden_size)
        record = replace(rows.record(hidden_size, init), tied=tied)
        self.weight = make_parameter(record, shape, mesh, dtype)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        # Vectors lie as their tokens do, and products want rows that follow each other.
        tokens_SB = tokens_BS.t().contiguous()
        if self.axis.size == 1:  # all rows are here: no masks
            return _Lookup.apply(self.weight, tokens_SB)  # type: ignore[no-any-return]
        local_SB = tokens_SB - self.rows.start
        foreign_SB = (local_SB < 0) | (local_SB >= self.rows.count)
        x_SBH = _Lookup.apply(self.weight, local_SB.masked_fill(foreign_SB, 0))
        x_SBH = x_SBH.masked_fill(foreign_SB.unsqueeze(-1), 0.0)
        return mappings.leave(x_SBH, self.axis, self.sequence_parallel)


def position_record(positions: int, hidden_size: int, init: Init, summed: bool) -> Sharding:
    """Return the record of a learned position table, which every rank holds whole."""
    return sharding.whole(
        (positions, hidden_size), init, replicated=("tp",), summed=("tp",) if summed else ()
    )
