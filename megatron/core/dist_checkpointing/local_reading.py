"""Reading a checkpoint whose parts are on the machines' own disks (`local`).

Every rank reads what is on its machine; what it lacks is sent by a rank that has it.
"""

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron.core import comm
from megatron.core.dist_checkpointing.boxes import intersection, relative, slabs, volume
from megatron.core.dist_checkpointing.format import CHUNK, CheckpointError
from megatron.core.dist_checkpointing.local import LocalFound
from megatron.core.dist_checkpointing.reader import Checkpoint
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

    def damages(
        self,
        files: Iterable[str] | None = None,
        told: Told = untold,
    ) -> list[str]:
        """Return what does not match its checksum, in the copies that this rank compares.

        All ranks together compare every copy on every machine, whichever ``files`` are asked for
        here: any of them may be read.
        """
        return super().damages(self.found.checked, told)

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
