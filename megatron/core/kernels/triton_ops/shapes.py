"""How tensors are laid out for kernels, and into which tiles a kernel cuts them.

A kernel reads rows: a tensor is a matrix of all leading dims by the last one, whose elements stand
side by side. Which tile and how many warps it takes follows from the width alone, so that what is
compiled ahead of time is what runs.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from megatron.core.kernels.norm import WIDEST_FUSED

ELEMENTS = 2048
"""Of a tile, where a row is not longer than that: 16 for each of 128 threads."""
PER_THREAD = 16
MOST_WARPS = 32
PROGRAMS = 256
"""Programs that sum over rows, each into a partial sum of its own: about two per multiprocessor."""


def as_rows(x: Tensor) -> Tensor:
    """Return ``x`` as a matrix whose rows may stand apart, without a copy where that is possible.

    The last dim has to be contiguous: a kernel would read the wrong elements of any other.
    """
    assert x.dim() and (x.stride(-1) == 1 or x.shape[-1] <= 1), (
        f"the last dim of a tensor of shape {tuple(x.shape)} has stride {x.stride(-1)}: "
        "kernels read elements that stand side by side; call contiguous()"
    )
    return x.reshape(-1, x.shape[-1])


def side_by_side(x: Tensor) -> Tensor:
    """Return ``x``, or a copy where its last dim is not contiguous, as a gradient may be."""
    return x if x.stride(-1) == 1 else x.contiguous()


def check_vector(x: Tensor, length: int) -> None:
    """Assert that ``x`` is a contiguous vector of ``length``."""
    assert x.shape == (length,) and x.is_contiguous(), (tuple(x.shape), x.stride(), length)


def wider(*tensors: Tensor) -> torch.dtype:
    """Return the dtype that holds the values of all tensors."""
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


class Tile(NamedTuple):
    """Rows and columns of a tile, both powers of two, and the warps that work on it."""

    rows: int
    columns: int
    warps: int


def row_tile(width: int) -> Tile:
    """Return a tile of whole rows."""
    assert width <= WIDEST_FUSED, f"a row of {width} does not fit registers; {WIDEST_FUSED} do"
    columns = triton.next_power_of_2(max(width, 1))
    rows = max(ELEMENTS // columns, 1)
    return Tile(rows, columns, _warps(rows * columns))


def flat_tile(width: int, elements: int = ELEMENTS) -> Tile:
    """Return a tile of pieces of rows."""
    columns = min(triton.next_power_of_2(max(width, 4)), elements)
    rows = elements // columns
    return Tile(rows, columns, _warps(elements))


def _warps(elements: int) -> int:
    return min(max(elements // (32 * PER_THREAD), 1), MOST_WARPS)


def share(rows: int, tile: Tile) -> int:
    """Return how many rows each program sums over: whole tiles, for at most `PROGRAMS`."""
    tiles = triton.cdiv(max(rows, 1), tile.rows)
    return int(triton.cdiv(tiles, PROGRAMS)) * tile.rows
