"""Copies of what each machine keeps on its own disk, on the machines of partners.

Each rank gives its part and its file to its partners and writes theirs; each passes on what it got,
as in a ring, a chunk at a time.
"""

import functools
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron.core import comm
from megatron.core.dist_checkpointing.boxes import spans
from megatron.core.dist_checkpointing.format import CHUNK, Index, parse_index, write_index
from megatron.core.dist_checkpointing.part import write_all
from megatron.core.dist_checkpointing.save import agree, whatever
from megatron.core.mesh import Axis


@dataclass(frozen=True)
class Copies:
    """Which ranks keep the same parts: ``count`` of them, ``jump`` apart; one keeps its own only.

    With 8 ranks, jump 2 and count 2, those are (0, 2) (1, 3) (4, 6) (5, 7).
    """

    jump: int = 1
    count: int = 1

    def partners(self, rank: int) -> tuple[int, ...]:
        """Return all ranks that keep the part of ``rank``, itself included, in ascending order."""
        block = self.jump * self.count
        first = rank // block * block + rank % self.jump
        return tuple(range(first, first + block, self.jump))


ALONE = Copies()
"""No copies."""


def part_name(rank: int) -> str:
    """Return the name of a rank's part of the index."""
    return f"rank{rank:05d}.json"


def exchange(folder: Path, part: Index, world: Axis, device: torch.device, copies: Copies) -> None:
    """Give this rank's part and file to its partners and write theirs; a collective of ``world``.

    Raises:
        SaveError: some rank could not read or write; every rank raises.
    """
    rank = world.coordinate
    partners = copies.partners(rank)
    ring = Axis("copies", partners, partners.index(rank), world.group)
    text = part.text().encode()
    name = next(iter(part.files), None)
    own = (len(text), part.bytes, name)
    told = comm.gather_objects(own, world)
    length = max(told[one][0] + told[one][1] for one in partners)
    others = [partners[(ring.coordinate - hop) % len(partners)] for hop in range(1, len(partners))]
    writers = {one: _Copy(folder, one, *told[one]) for one in others}
    problem = None
    stream = _Stream(folder, text, name)
    for start, stop in spans(0, length, CHUNK):
        chunk = torch.zeros(stop - start, dtype=torch.uint8)
        if problem is None:  # whoever cannot read goes on to pass on, so that nobody waits
            problem = whatever(functools.partial(stream.read_into, chunk), True)
        passed = chunk.to(device)
        for one in others:
            passed = comm.shift(passed, ring).wait()
            if problem is None:  # whoever cannot write goes on to pass on
                problem = whatever(functools.partial(writers[one].add, passed), True)
    for copy in writers.values():
        problem = problem or whatever(copy.finish, True)
    for close in (stream.close, *(copy.close for copy in writers.values())):
        failure = whatever(close, True)  # a write that was put off may fail here
        problem = problem or failure
    agree(problem, world)


class _Stream:
    """A part and then its file, as one run of bytes with zeros after it."""

    def __init__(self, folder: Path, text: bytes, name: str | None) -> None:
        self._rest, self._path = text, folder / name if name is not None else None
        self._file: int | None = None

    def read_into(self, chunk: Tensor) -> None:
        """Fill the beginning of a chunk of zeros with the next bytes."""
        view = memoryview(chunk.numpy())  # type: ignore[arg-type]
        taken = min(len(self._rest), len(view))
        view[:taken] = self._rest[:taken]
        self._rest = self._rest[taken:]
        if self._path is not None and self._file is None:
            self._file = os.open(self._path, os.O_RDONLY)
        while self._file is not None and taken < len(view):
            got = os.readv(self._file, [view[taken:]])
            if not got:
                break
            taken += got

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)


class _Copy:
    """Takes another rank's part and file as they come, and writes them."""

    def __init__(self, folder: Path, rank: int, head: int, size: int, name: str | None) -> None:
        self.path, self.head, self.left = folder / part_name(rank), head, size
        self.text = b""
        self.target = folder / name if name is not None else None
        self.file: int | None = None

    def add(self, chunk: Tensor) -> None:
        """Take the next bytes of the stream."""
        data = chunk.to("cpu").numpy().tobytes()
        missing = self.head - len(self.text)
        self.text += data[:missing]
        body = data[missing : missing + self.left]
        self.left -= len(body)
        if self.target is not None and body:
            if self.file is None:
                self.file = os.open(self.target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            write_all(self.file, memoryview(body))

    def finish(self) -> None:
        """Put all of it on disk, the part last."""
        if self.file is not None:
            os.fsync(self.file)
        index = parse_index(self.text.decode(), f"the part for {self.path}")
        write_index(index, self.path)

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            os.close(self.file)
