"""What a rank saves or fills, as boxes of logical tensors.

An `Item` is one logical tensor and the part of it that this rank holds: pieces, each a box of the
logical tensor and a view of local memory of the box's shape. Whole parameters and flat optimizer
shards become items by the same two steps: cut what is held into boxes of the local tensor (a flat
range of a row-major tensor is at most 2n-1 of them), then carry each through the regions of the
parameter's `Sharding`. So any layout writes without moving a tensor, and any other reads the boxes
it needs; rows that only pad a vocabulary lie in no region and are neither written nor read.

Saving takes owners only (give ``coordinates``), loading everything that is held.

Numbers that are kept in a form of their own (`Coded`) are decoded while they are written or filled,
some chunks at a time: pieces of them are views of a tensor without memory.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.boxes import intersection, relative, shifted, spans
from megatron.core.sharding import Box, Region, Sharding, box_shape, box_slices, local_boxes


class Coded(Protocol):
    """Flat numbers that are kept in a form of their own."""

    def numel(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def decoded(self, start: int, stop: int) -> Tensor:
        """Return a copy of numbers ``start`` to ``stop``."""
        ...

    def copy_(self, values: Tensor) -> object:
        """Set all numbers."""
        ...

    def __getitem__(self, part: slice) -> "Coded":
        """Return a part as a view; it starts at a multiple of `CUT`."""
        ...


CUT = 64
"""Where numbers of a form of their own may be cut: no less than this is encoded at once."""


@dataclass(frozen=True)
class Piece:
    """A box of a logical tensor and the view of local memory that holds it."""

    box: Box
    tensor: Tensor
    coded: Coded | None = None
    """What keeps the numbers, where `tensor` is a view of one without memory (``meta``)."""

    def __post_init__(self) -> None:
        assert tuple(self.tensor.shape) == box_shape(self.box), f"{self.tensor.shape} {self.box}"

    @property
    def device(self) -> torch.device:
        """Return where the numbers are."""
        return self.tensor.device if self.coded is None else self.coded.device


def values(view: Tensor, coded: Coded | None) -> Tensor:
    """Return the numbers of a piece, or of a part of one: its view, or a decoded copy."""
    if coded is None or not view.numel():
        return view
    flat = coded.decoded(*_extent(view))
    return flat.as_strided(view.shape, view.stride())


@dataclass(frozen=True)
class Item:
    """One logical tensor and the pieces of it that this rank holds (perhaps none)."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    sources: tuple[str, ...] = ()
    """Stored keys to fill from, the first that exists; the item's own key when empty."""

    @property
    def coded(self) -> Coded | None:
        """Return what keeps the numbers of all pieces, if it is not their tensors."""
        return self.pieces[0].coded if self.pieces else None


def decoding(item: Item, coded: Coded, limit: int) -> Iterator[list[Piece]]:
    """Yield pieces to copy into instead of an item's own; each list is encoded before the next.

    No more than ``limit`` bytes are decoded at a time. What is encoded together, `CUT` numbers, is
    never in two lists.
    """
    step = max(limit // item.dtype.itemsize // CUT, 1) * CUT
    for start, stop in spans(0, coded.numel(), step):
        flat = coded.decoded(start, stop)
        yield [
            Piece(box, flat.as_strided(view.shape, view.stride(), view.storage_offset() - start))
            for piece in item.pieces
            for box, view in _within(piece.box, piece.tensor, start, stop)
        ]
        coded[start:stop].copy_(flat)


def _within(box: Box, view: Tensor, start: int, stop: int) -> Iterator[tuple[Box, Tensor]]:
    """Yield the parts of a view that lie in [start, stop) of its storage, by halving it."""
    first, last = _extent(view)
    if first >= stop or last <= start:
        return
    if start <= first and last <= stop:
        yield box, view
        return
    dim = next(number for number, size in enumerate(view.shape) if size > 1)
    (low, high), half = box[dim], view.shape[dim] // 2
    for size, offset in ((half, 0), (high - low - half, half)):
        edges = (low + offset, low + offset + size)
        part = (*box[:dim], edges, *box[dim + 1 :])
        yield from _within(part, view.narrow(dim, offset, size), start, stop)


def _extent(view: Tensor) -> tuple[int, int]:
    """Return from where to where a view that is not empty lies in its storage, in elements."""
    first = int(view.storage_offset())
    steps = zip(view.shape, view.stride(), strict=True)
    return first, first + 1 + sum((size - 1) * step for size, step in steps)


def chunks(tensor: Tensor, limit: int) -> Iterator[Tensor]:
    """Yield views of at most ``limit`` bytes that hold ``tensor`` in row-major order."""
    if tensor.nbytes <= limit:
        if tensor.numel():
            yield tensor
    elif tensor.is_contiguous():
        yield from tensor.reshape(-1).split(limit // tensor.element_size())
    else:
        row = math.prod(tensor.shape[1:]) * tensor.element_size()
        for rows in tensor.split(max(limit // row, 1)):
            yield from chunks(rows if row <= limit else rows[0], limit)


def of_tensor(
    key: str,
    record: Sharding,
    tensor: Tensor,
    *,
    coordinates: Mapping[str, int] | None = None,
    sources: Sequence[str] = (),
) -> Item:
    """Return the item of a whole local tensor with the layout of ``record``."""
    data = tensor.detach()
    pieces = tuple(
        Piece(region.logical, data[box_slices(region.local)])
        for region in _regions(record, coordinates)
        if math.prod(box_shape(region.local))
    )
    return Item(key, record.shape, data.dtype, pieces, tuple(sources))


def of_flat(
    key: str,
    record: Sharding,
    local_shape: Sequence[int],
    start: int,
    data: Tensor,
    *,
    coordinates: Mapping[str, int] | None = None,
    sources: Sequence[str] = (),
    coded: Coded | None = None,
) -> Item:
    """Return the item of a flat shard: ``data`` holds elements from ``start`` of a local tensor.

    Args:
        key: name in the checkpoint.
        record: what the local tensor is of the logical model.
        local_shape: shape of the whole local tensor.
        start: flat offset in it of the first element of ``data``.
        data: contiguous, one-dimensional; on ``meta``, from the start of its storage, if ``coded``.
        coordinates: position on the mesh, to take owned regions only; absent: all regions.
        sources: see `Item`.
        coded: see `Piece`.
    """
    regions = _regions(record, coordinates)
    flat = data.detach()
    pieces = []
    for box, offset in local_boxes(local_shape, start, start + flat.numel()):
        shape = box_shape(box)
        block = flat[offset - start : offset - start + math.prod(shape)].view(shape)
        for region in regions:
            common = intersection(box, region.local)
            if common is not None:
                logical = shifted(common, region.local, region.logical)
                pieces.append(Piece(logical, block[box_slices(relative(common, box))], coded))
    return Item(key, record.shape, flat.dtype, tuple(pieces), tuple(sources))


def spread(items: Iterable[Item], replica: int, replicas: int) -> list[Item]:
    """Return this replica's share of items that ``replicas`` ranks hold alike.

    Every replica passes the same items in the same order. Elements of one dtype are numbered
    through and cut into equal ranges, so each byte is written once and the work is even.
    """
    items = list(items)
    totals: dict[torch.dtype, int] = {}
    for item in items:
        size = sum(piece.tensor.numel() for piece in item.pieces)
        totals[item.dtype] = totals.get(item.dtype, 0) + size
    passed = dict.fromkeys(totals, 0)
    mine = []
    for item in items:
        total = totals[item.dtype]
        first, last = total * replica // replicas, total * (replica + 1) // replicas
        pieces: list[Piece] = []
        for piece in item.pieces:
            base = passed[item.dtype]
            passed[item.dtype] += piece.tensor.numel()
            pieces += _cut(piece, first - base, last - base)
        mine.append(replace(item, pieces=tuple(pieces)))
    return mine


def _cut(piece: Piece, start: int, stop: int) -> Iterator[Piece]:
    """Yield the pieces that hold elements [start, stop) of ``piece``, counted row-major."""
    start, stop = max(start, 0), min(stop, piece.tensor.numel())
    if start == 0 and stop == piece.tensor.numel():
        yield piece
        return
    for box, _ in local_boxes(piece.tensor.shape, start, stop):
        logical = tuple(
            (first + low, first + high)
            for (first, _), (low, high) in zip(piece.box, box, strict=True)
        )
        yield replace(piece, box=logical, tensor=piece.tensor[box_slices(box)])


def _regions(record: Sharding, coordinates: Mapping[str, int] | None) -> tuple[Region, ...]:
    return record.regions if coordinates is None else record.owned(coordinates)
