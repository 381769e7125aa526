"""Which positions of a sample a context-parallel rank holds: zig-zag, so that causal work is even.

A sample of S positions is cut into 2 n chunks over n ranks; rank i holds chunk i, which sees
little, and chunk 2 n - 1 - i, which sees much, in this order. The cut is over positions of the
sample, not of its documents, which would change the data; packed documents are a matter of the
mask.

    n = 2:   | 0 | 1 | 1 | 0 |        n = 3:   | 0 | 1 | 2 | 2 | 1 | 0 |

Labels are the next tokens of the whole sample: shift first, then cut, since the token after a
chunk's last stands on another rank.

Shapes: S positions of a sample, s = S / n positions of a rank, B batch.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron.core.utils import divide

SAMPLE_WIDE = ("cu_seqlens", "sentence_order", "encoder_valid")
"""Entries of a microbatch that describe whole samples: every rank keeps them as they are."""


def spans(sequence: int, coordinate: int, size: int) -> tuple[range, range]:
    """Return the two runs of positions that a coordinate holds, in its order."""
    chunk = divide(sequence, 2 * size)
    first, second = coordinate, 2 * size - 1 - coordinate
    return (
        range(first * chunk, (first + 1) * chunk),
        range(second * chunk, (second + 1) * chunk),
    )


def positions(sequence: int, coordinate: int, size: int) -> Tensor:
    """Return the position of each local token, ``[s]``."""
    if size == 1:
        return torch.arange(sequence)
    runs = spans(sequence, coordinate, size)
    return torch.cat([torch.arange(run.start, run.stop) for run in runs])


def cut(x: Tensor, dim: int, coordinate: int, size: int) -> Tensor:
    """Return what a coordinate holds of ``x``, whose ``dim`` is the positions of a sample."""
    if size == 1:
        return x
    runs = spans(x.shape[dim], coordinate, size)
    return torch.cat([x.narrow(dim, run.start, len(run)) for run in runs], dim)


def join(shares: Sequence[Tensor], dim: int) -> Tensor:
    """Return the whole of which ``shares`` are the cuts, in coordinate order."""
    if len(shares) == 1:
        return shares[0]
    return unzigzag(torch.cat([x.movedim(dim, 0) for x in shares]), len(shares)).movedim(0, dim)


def unzigzag(x: Tensor, size: int) -> Tensor:
    """Put dim 0, the shares of all ranks in coordinate order, in order of position."""
    chunks = x.unflatten(0, (size, 2, divide(x.shape[0], 2 * size)))
    return torch.cat((chunks[:, 0], chunks[:, 1].flip(0))).flatten(0, 1)


def zigzag(x: Tensor, size: int) -> Tensor:
    """Put dim 0, in order of position, in order of the ranks that hold it."""
    chunks = x.unflatten(0, (2 * size, divide(x.shape[0], 2 * size)))
    return torch.stack((chunks[:size], chunks[size:].flip(0)), 1).flatten(0, 2)


def cut_microbatch(batch: Mapping[str, Tensor], coordinate: int, size: int) -> dict[str, Tensor]:
    """Return a coordinate's share of a microbatch of [B, S] tensors.

    Documents keep the bounds of the whole sample, and positions their global values.
    """
    return {
        name: x if name in SAMPLE_WIDE else cut(x, 1, coordinate, size) for name, x in batch.items()
    }
