"""Loading what each machine keeps on its own disk (`local`).

Every rank reads what is here, and what it lacks is sent by a rank that has it, so that the layout,
and the places of the ranks, may be others than those that saved. A copy whose checksum is wrong is
as good as none.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatron.core import comm
from megatron.core.dist_checkpointing.boxes import intersection, relative, slabs, volume
from megatron.core.dist_checkpointing.format import CHUNK, CheckpointError
from megatron.core.dist_checkpointing.local import LocalFound
from megatron.core.dist_checkpointing.reader import Checkpoint, DamagedError
from megatron.core.dist_checkpointing.save import agree, attempt
from megatron.core.mesh import Axis
from megatron.core.progress import Told, untold
from megatron.core.sharding import Box, box_shape, box_slices


class LocalCheckpoint(Checkpoint):
    """A complete save, open for reading: what is not on this machine is sent by another."""

    def __init__(self, root: Path | None, found: LocalFound, world: Axis, device: torch.device):
        super().__init__((root or Path()) / found.name, found.index)
        self.found, self.world, self.device = found, world, device
        self._received: dict[tuple[str, int], list[tuple[Box, Tensor]]] = {}
        """What others sent of each stored box, as boxes of the tensor."""

    def compare(self, told: Told = untold) -> tuple[LocalFound, list[str]]:
        """Compare the checksums of every copy on every machine; a collective of the world.

        Returns what was found without the copies that are not as they were written, or cannot be
        read, so that partners' are read in their place; and what is wrong with each of them.
        ``told`` hears of each piece that this rank has read.

        Raises:
            DamagedError: of some file there is no sound copy; every rank raises.
        """
        rank, found = self.world.coordinate, self.found
        faults = {file: fault for file in found.checked(rank) if (fault := self._fault(file, told))}
        everyone = comm.gather_objects((found.beside, found.own, faults), self.world)
        sound = [
            own - {file for one in beside for file in everyone[one][2]}
            for beside, own, _ in everyone
        ]
        problems = [
            f"rank {one}: {fault}"
            for one, (_, _, its) in enumerate(everyone)
            for fault in its.values()
        ]
        holders: dict[str, int] = {}
        for one, files in enumerate(sound):
            holders.update((file, one) for file in files if file not in holders)
        lost = sorted(found.holders.keys() - holders.keys())
        if lost:
            raise DamagedError(
                f"{self.folder} is damaged: no copy of {', '.join(lost)} is as it was written:\n  "
                + "\n  ".join(problems)
            )
        return replace(found, own=sound[rank], holders=holders), problems

    def _fault(self, file: str, told: Told) -> str | None:
        """Return what is wrong with a file that is here; None if it is sound."""
        found: list[str] = []
        problem = attempt(lambda: found.extend(self._mismatches([file], told)), True)
        return problem or "; ".join(found) or None

    def fetch(self, wanted: Iterable[tuple[str, Box]]) -> None:
        """Receive what boxes of tensors need and this machine lacks; a collective of the world.

        Kept is what this rank asks for and no more; what is under way is one chunk, whoever wants
        it and however large the stored box is.
        """
        lacking = self._lacking(wanted)
        everyone = comm.gather_objects(
            {place: [box for box, _ in parts] for place, parts in lacking.items()}, self.world
        )
        asked: dict[tuple[str, int], list[Box]] = {}
        for one in everyone:
            for place, boxes in one.items():
                asked.setdefault(place, []).extend(boxes)
        problem = None
        for place in sorted(asked):
            problem = self._pass_on(place, asked[place], lacking.get(place, []), problem)
        agree(problem, self.world, CheckpointError)
        self._received = lacking

    def _lacking(
        self, wanted: Iterable[tuple[str, Box]]
    ) -> dict[tuple[str, int], list[tuple[Box, Tensor]]]:
        """Return memory for what is asked for of each stored box that is not on this machine."""
        found: dict[tuple[str, int], list[tuple[Box, Tensor]]] = {}
        for key, box in wanted:
            stored = self.index.tensors[key]
            if len(box) != len(stored.shape):
                continue  # loading lists what does not fit, all at once
            for number, one in enumerate(stored.boxes):
                common = intersection(one.box, box)
                if common is not None and one.file not in self.found.own:
                    memory = torch.empty(box_shape(common), dtype=stored.torch_dtype)
                    found.setdefault((key, number), []).append((common, memory))
        return found

    def _pass_on(
        self,
        place: tuple[str, int],
        asked: Sequence[Box],
        mine: Sequence[tuple[Box, Tensor]],
        problem: str | None,
    ) -> str | None:
        """Give what is asked for of a stored box to all ranks; return what was in the way."""
        stored = self.index.tensors[place[0]]
        one = stored.boxes[place[1]]
        holder, offset = self.found.holders[one.file], one.offset
        for slab in slabs(one.box, stored.torch_dtype.itemsize, CHUNK):
            length = volume(slab) * stored.torch_dtype.itemsize
            if any(intersection(slab, box) is not None for box in asked):
                chunk = torch.zeros(length, dtype=torch.uint8)
                if holder == self.world.coordinate and problem is None:
                    read = functools.partial(self._read, one.file, chunk, offset)
                    problem = attempt(read, True)  # nobody else is left waiting
                moved = chunk.to(self.device)
                comm.broadcast(moved, self.world, holder)
                chunk.copy_(moved)
                block = chunk.view(stored.torch_dtype).view(box_shape(slab))
                for box, memory in mine:
                    common = intersection(slab, box)
                    if common is not None:
                        part = block[box_slices(relative(common, slab))]
                        memory[box_slices(relative(common, box))] = part
            offset += length
        return problem

    def _fill_from(self, key: str, number: int, common: Box, target: Tensor) -> None:
        """Fill a view from a stored box, or from what was received of it."""
        received = self._received.get((key, number))
        if received is None:
            super()._fill_from(key, number, common, target)
            return
        for box, memory in received:
            if intersection(box, common) == common:
                target.copy_(memory[box_slices(relative(common, box))])
                return
        raise AssertionError(f"{key} {common} was not fetched")
