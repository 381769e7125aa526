"""Loading: fill the boxes that this rank holds, from whichever boxes the files hold.

`Checkpoint` is an open folder: it reads any box of any tensor, only the bytes that are needed, a
chunk at a time, and straight into place where that is contiguous host memory of the same dtype.
`load` compares first and reads after: what is missing, left over, or of another shape or kind is
listed whole and refused (or as ``strictness`` says), before any tensor is touched.

A floating-point state of another precision is converted to that of its target, which the precision
flags have chosen, and the report says so; nothing else is ever converted.
"""

import math
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from megatron.core import comm
from megatron.core.dist_checkpointing.format import (
    CHUNK,
    CheckpointError,
    Index,
    StoredBox,
    StoredTensor,
    open_complete,
)
from megatron.core.dist_checkpointing.plan import (
    Item,
    Piece,
    intersection,
    relative,
    uncovered,
    volume,
)
from megatron.core.dist_checkpointing.strictness import (
    LENIENT_ABOUT_MISSING,
    STRICT_ABOUT_UNEXPECTED,
    Strictness,
)
from megatron.core.mesh import Axis
from megatron.core.sharding import Box, box_shape, box_slices


class DamagedError(CheckpointError):
    """Bytes of a checkpoint are not those that were written."""


@dataclass
class LoadReport:
    """What a load did on this rank; missing and unexpected are of all ranks."""

    hash: str
    bytes: int = 0
    tensors: int = 0
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    converted: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """Keys by (stored dtype, dtype here)."""
    substituted: dict[str, str] = field(default_factory=dict)
    """Stored key by the key that it stood in for."""


class Checkpoint:
    """A complete checkpoint, open for reading; close it or use it in a ``with`` block."""

    def __init__(self, folder: Path, index: Index | None = None) -> None:
        self.folder = folder
        self.index = index if index is not None else open_complete(folder)
        self._descriptors: dict[str, int] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    @property
    def facts(self) -> dict[str, Any]:
        """Return what the run said about itself."""
        return self.index.facts

    def read(self, key: str, box: Box | None = None) -> Tensor:
        """Return a tensor, or one box of it, in the stored dtype."""
        stored = self.index.tensors[key]
        wanted = box if box is not None else tuple((0, size) for size in stored.shape)
        out = torch.empty(box_shape(wanted), dtype=stored.torch_dtype)
        self.fill(key, Piece(wanted, out))
        return out

    def fill(self, key: str, piece: Piece) -> None:
        """Read one box of a tensor into a view, converting to its dtype."""
        stored = self.index.tensors[key]
        found = 0
        for box in stored.boxes:
            common = intersection(box.box, piece.box)
            if common is None:
                continue
            target = piece.tensor[box_slices(relative(common, piece.box))]
            wanted = box_slices(relative(common, box.box))
            self._fill(stored, box, box_shape(box.box), box.offset, wanted, target)
            found += volume(common)
        assert found == volume(piece.box), f"{key} {piece.box}: {found} elements found"

    def _fill(
        self,
        stored: StoredTensor,
        box: StoredBox,
        shape: Sequence[int],
        offset: int,
        wanted: Sequence[slice],
        target: Tensor,
    ) -> None:
        """Read ``wanted`` of the block of ``shape`` at ``offset`` of a file into ``target``."""
        size = stored.torch_dtype.itemsize
        row = math.prod(shape[1:]) * size
        rows = wanted[0] if wanted else slice(0, 1)
        inner = tuple(wanted[1:])
        whole = all(w == slice(0, extent) for w, extent in zip(inner, shape[1:], strict=True))
        if not whole and row > CHUNK // 16:
            # Wide rows of which a part is wanted: look into each.
            for number in range(rows.start, rows.stop):
                place = offset + number * row
                self._fill(stored, box, shape[1:], place, inner, target[number - rows.start])
            return
        direct = (
            whole
            and target.is_contiguous()
            and target.dtype == stored.torch_dtype
            and target.device.type == "cpu"
        )
        step = max(CHUNK // row, 1) if row else 1
        target = target if wanted else target.reshape(1)
        for first in range(rows.start, rows.stop, step):
            last = min(first + step, rows.stop)
            part = target[first - rows.start : last - rows.start]
            length = (last - first) * row
            raw = part.reshape(-1).view(torch.uint8) if direct else self._scratch(length)
            self._read(box.file, raw, offset + first * row)
            if not direct:
                block = raw.view(stored.torch_dtype).view(last - first, *shape[1:])
                part.copy_(block[(slice(None), *inner)])

    def _scratch(self, length: int) -> Tensor:
        if self._buffer.numel() < length:
            self._buffer = torch.empty(length, dtype=torch.uint8)
        return self._buffer[:length]

    def _open(self, file: str) -> int:
        if file not in self._descriptors:
            self._descriptors[file] = os.open(self.folder / file, os.O_RDONLY)
        return self._descriptors[file]

    def _read(self, file: str, out: Tensor, offset: int) -> None:
        """Fill a flat uint8 tensor from a file."""
        descriptor = self._open(file)
        view = memoryview(out.numpy())  # type: ignore[arg-type]
        while view:
            got = os.preadv(descriptor, [view], offset)
            if got == 0:
                raise CheckpointError(f"{self.folder / file} ends at byte {offset}")
            view, offset = view[got:], offset + got

    def damages(self, files: Iterable[str] | None = None) -> list[str]:
        """Return what does not match its checksum, tensor by tensor (in ``files``, or in all).

        Coverage is checked too: whoever changed an index with care could have left out a box.
        """
        chosen = set(self.index.files if files is None else files)
        problems, boxes = [], []
        for key, stored in self.index.tensors.items():
            hole = uncovered(stored.shape, [box.box for box in stored.boxes])
            if hole is not None:
                problems.append(f"{key}: {hole}")
            boxes += [(key, stored.bytes_of(box), box) for box in stored.boxes]
        boxes = [entry for entry in boxes if entry[2].file in chosen]
        for file in chosen:
            self._open(file)
        with ThreadPoolExecutor(4) as readers:
            checksums = readers.map(lambda entry: self._crc32(entry[2], entry[1]), boxes)
            for (key, _, box), crc in zip(boxes, checksums, strict=True):
                if crc != box.crc32:
                    place = f"{box.file} from byte {box.offset}"
                    problems.append(f"{key}: {place} does not match its checksum")
        return problems

    def _crc32(self, box: StoredBox, length: int) -> int:
        crc = 0
        buffer = torch.empty(min(CHUNK, length), dtype=torch.uint8)
        for start in range(0, length, CHUNK):
            raw = buffer[: min(CHUNK, length - start)]
            self._read(box.file, raw, box.offset + start)
            crc = zlib.crc32(memoryview(raw.numpy()), crc)  # type: ignore[arg-type]
        return crc


def load(
    items: Iterable[Item],
    checkpoint: Checkpoint,
    world: Axis,
    *,
    strictness: Strictness = "raise_all",
    set_aside: Sequence[str] = (),
    verify: bool = False,
    fits: Callable[[], None] = lambda: None,
) -> LoadReport:
    """Fill every item from a checkpoint; a collective of ``world``.

    Args:
        items: what this rank holds.
        checkpoint: where from.
        world: all ranks; a stored tensor is unexpected when none of them asks for it.
        strictness: what to do with keys that have no partner.
        set_aside: beginnings of stored keys that are left out on purpose.
        verify: compare every checksum first (the ranks share the files).
        fits: called on every rank once everything is known to fit, before anything is filled.

    Raises:
        CheckpointError: something does not fit or is damaged; nothing was filled.
    """
    items = list(items)
    index = checkpoint.index
    if verify:
        mine = sorted(index.files)[world.coordinate :: world.size]
        damages = _all(checkpoint.damages(mine), world)
        if damages:
            raise DamagedError(
                f"{checkpoint.folder} is damaged: the bytes are not those that were written:\n  "
                + "\n  ".join(damages)
            )
    report = LoadReport(index.hash)
    chosen = {item.key: _source(item, index) for item in items}
    misfits = [_misfit(item, chosen[item.key], index) for item in items]
    wanted = {key for item in items for key in (item.key, *item.sources)}
    report.missing = _all([key for key, source in chosen.items() if source is None], world)
    asked = set(_all(wanted, world))
    report.unexpected = [
        key for key in index.tensors if key not in asked and not key.startswith(tuple(set_aside))
    ]
    _refuse(
        checkpoint,
        [
            ("missing", report.missing if strictness not in LENIENT_ABOUT_MISSING else []),
            ("unexpected", report.unexpected if strictness in STRICT_ABOUT_UNEXPECTED else []),
            ("of another shape or type", _all([text for text in misfits if text], world)),
        ],
    )
    fits()
    for item in items:
        source = chosen[item.key]
        if source is None:
            continue
        for piece in item.pieces:
            checkpoint.fill(source, piece)
            report.bytes += piece.tensor.nbytes
        report.tensors += 1
        _note(item, source, index.tensors[source], report)
    return report


def _source(item: Item, index: Index) -> str | None:
    """Return the first stored key that can fill ``item``."""
    return next((key for key in item.sources or (item.key,) if key in index.tensors), None)


def _misfit(item: Item, source: str | None, index: Index) -> str | None:
    if source is None:
        return None
    stored = index.tensors[source]
    same_kind = stored.torch_dtype == item.dtype or (
        stored.torch_dtype.is_floating_point and item.dtype.is_floating_point
    )
    if stored.shape == item.shape and same_kind:
        return None
    here = str(item.dtype).removeprefix("torch.")
    return f"{source}: {stored.dtype} {list(stored.shape)}, here {here} {list(item.shape)}"


def _note(item: Item, source: str, stored: StoredTensor, report: LoadReport) -> None:
    if source != item.key:
        report.substituted[item.key] = source
    here = str(item.dtype).removeprefix("torch.")
    if stored.dtype != here:
        report.converted.setdefault((stored.dtype, here), []).append(item.key)


def _all(mine: Iterable[str], world: Axis) -> list[str]:
    """Return what any rank has, sorted."""
    return sorted(set().union(*comm.gather_objects(sorted(mine), world)))


def _refuse(checkpoint: Checkpoint, problems: Sequence[tuple[str, list[str]]]) -> None:
    """Raise when any list has an entry; the message holds every entry."""
    parts = [
        f"{len(keys)} tensor(s) {what}:\n  " + "\n  ".join(keys) for what, keys in problems if keys
    ]
    if parts:
        raise CheckpointError(f"{checkpoint.folder} does not fit this run; " + "\n".join(parts))
