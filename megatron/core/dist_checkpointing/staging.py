"""What a rank writes: views of its tensors, or copies that training cannot change.

Copies lie end to end in one buffer of host memory that is kept from save to save: a run's memory is
the same after every save, and only the first one pays for new pages (which takes longer than the
copy). A limit bounds it. Pieces beyond the limit stay views, which are to be written before
training goes on; so less memory costs a longer stall, and never the run.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.format import ALIGNMENT, CHUNK
from megatron.core.dist_checkpointing.plan import Item, Piece, chunks, values
from megatron.core.utils import round_up


@dataclass(frozen=True)
class Staged:
    """What one rank writes."""

    items: list[Item]
    copied: frozenset[int] = frozenset()
    """Numbers of the pieces that are copies, counted through all items."""

    @property
    def bytes(self) -> int:
        """Return the size of the file it makes."""
        return sum(
            round_up(piece.tensor.nbytes, ALIGNMENT) for item in self.items for piece in item.pieces
        )


class HostBuffer:
    """Memory for copies, as much as the largest save has needed.

    Args:
        limit: the most bytes to take; None for as many as there are to copy.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pinned = False

    @property
    def bytes(self) -> int:
        """Return the bytes that are held."""
        return self._memory.numel()

    def take(self, size: int, *, pinned: bool = False) -> Tensor:
        """Return ``size`` bytes, uint8; what was taken before is given up.

        Args:
            size: at most the limit.
            pinned: a CUDA device copies into it without a detour.
        """
        if size > self.bytes:
            self.free()
            self._memory = torch.empty(size, dtype=torch.uint8)
            if pinned:
                _pin(self._memory)
                self._pinned = True
        return self._memory[:size]

    def free(self) -> None:
        """Give the memory back."""
        if self._pinned:
            _unpin(self._memory)
            self._pinned = False
        self._memory = torch.empty(0, dtype=torch.uint8)


# Not torch's own pinned memory, which comes in powers of two.
def _pin(memory: Tensor) -> None:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))


def _unpin(memory: Tensor) -> None:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(runtime.cudaHostUnregister(memory.data_ptr()))


def stage(items: Iterable[Item], buffer: HostBuffer | None = None) -> Staged:
    """Return what to write: copies in ``buffer`` as far as its limit goes, else views.

    On return the copies are made; the buffer's next use overwrites them.
    """
    items = list(items)
    pieces = [piece for item in items for piece in item.pieces]
    cuda = any(piece.device.type == "cuda" for piece in pieces)
    offsets: dict[int, int] = {}
    if buffer is not None:
        offsets, size = _places(pieces, buffer.limit)
        memory = buffer.take(size, pinned=cuda)
        for number, offset in offsets.items():
            pieces[number] = _copied(pieces[number], memory[offset:])
    if cuda:
        torch.cuda.current_stream().synchronize()
    following = iter(pieces)
    items = [replace(item, pieces=tuple(next(following) for _ in item.pieces)) for item in items]
    return Staged(items, frozenset(offsets))


def _places(pieces: list[Piece], limit: int | None) -> tuple[dict[int, int], int]:
    """Return where each piece that fits is copied to, by its number, and the bytes it takes."""
    places: dict[int, int] = {}
    size = 0
    for number, piece in enumerate(pieces):
        needed = round_up(piece.tensor.nbytes, ALIGNMENT)
        if limit is None or size + needed <= limit:
            places[number] = size
            size += needed
    return places, size


def _copied(piece: Piece, memory: Tensor) -> Piece:
    view = piece.tensor
    copy = memory[: view.nbytes].view(view.dtype)
    if piece.coded is None:
        copy.view(view.shape).copy_(view, non_blocking=True)
    else:  # a chunk of it is decoded at a time
        done = 0
        for part in chunks(view, CHUNK):
            place = copy[done : done + part.numel()].view(part.shape)
            place.copy_(values(part, piece.coded), non_blocking=True)
            done += part.numel()
    return Piece(piece.box, copy.view(view.shape))
