"""``--check-weight-hash-across-dp-replicas-interval N``: are weights equal that must be equal?

A region of a parameter has copies on every data- and context-parallel replica, on the ranks along
the axes its record names (norm weights over all tensor-parallel ranks, shared key heads over some),
and a tied embedding on the first and the last stage. Updates keep them equal without ever comparing
them, so that a fault of a device, or a gradient summed over too few ranks, stays unseen while the
copies drift apart.

The check makes one 64-bit hash of each region on the device, and takes the largest and the smallest
over each axis by one small all-reduce. Only when these differ, names of regions and then the hashes
of all who hold them travel, to tell which ranks stand against which.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.core import comm, sharding
from megatron.core.distributed.replicas import Replicas
from megatron.core.mesh import Mesh
from megatron.core.sharding import Box
from megatron.training.failing.failure import RunFailed

_CHUNK = 2**22
"""Elements hashed at once: each takes three 8-byte integers meanwhile."""
_FACTOR = 0x9E3779B97F4A7C15 - 2**64  # 2^64 over the golden ratio: an odd number of mixed bits
_LOW = 0xFFFFFFFF
SHOWN = 5
"""Parameters that a message names."""

_Key = tuple[str, Box]
"""Name of a parameter and the box of the logical tensor."""


@dataclass(frozen=True)
class _Copy:
    """A region of a parameter on this rank."""

    key: _Key
    axes: tuple[str, ...]
    """Along which other ranks hold it too."""


class ReplicaCheck:
    """Compares this rank's weights with the copies on other ranks.

    Args:
        replicas: the weights of this rank's parts of the model.
        mesh: of the run.
        interval: iterations between checks.
    """

    def __init__(self, replicas: Replicas, mesh: Mesh, interval: int) -> None:
        self._replicas, self._mesh, self._interval = replicas, mesh, interval
        self._copies = [copy for parameter in replicas.parameters for copy in _copies(parameter)]
        self._passed: int | None = None

    def after(self, iteration: int) -> None:
        """Check when it is due after ``iteration``; a collective of the world.

        Raises:
            RunFailed: copies differ; on all ranks, with one message.
        """
        if iteration % self._interval == 0:
            found = self.differences()
            if found:
                raise RunFailed(self._message(iteration, found))
            self._passed = iteration

    @torch.no_grad()
    def differences(self) -> list[str]:
        """Return a line for each region whose copies differ; a collective of the world."""
        device = self._mesh.device
        hashes = [
            fingerprint(parameter[sharding.box_slices(region.local)])
            for parameter in self._replicas.whole_parameters()
            for region in sharding.of(parameter).regions
        ]
        mine = torch.stack(hashes) if hashes else torch.zeros(0, dtype=torch.int64, device=device)
        differs = torch.zeros(len(hashes), dtype=torch.bool, device=device)
        # In one order on all ranks, whose stages begin with other kinds of parameters.
        for name in sorted({axis for copy in self._copies for axis in copy.axes}):
            if self._mesh[name].size > 1:
                at = [i for i, copy in enumerate(self._copies) if name in copy.axes]
                index = torch.tensor(at, device=device)
                # The complement turns the order around: one reduction gives both ends.
                ends = torch.cat([mine[index], ~mine[index]])
                comm.all_reduce(ends, self._mesh[name], "max")
                largest, smallest = ends[: len(at)], ~ends[len(at) :]
                differs[index] |= largest != smallest
        count = differs.sum()
        comm.all_reduce(count, self._mesh.world, "max")
        with comm.waiting("the comparison of copies"):
            equal = count.item() == 0
        if equal:
            return []
        suspects = [self._copies[i].key for i in differs.nonzero().flatten().tolist()]
        known = comm.gather_objects(suspects, self._mesh.world)
        # A rank may hold a region and see no difference: those it compares with are equal to it.
        keys = dict.fromkeys(key for found in known for key in found)
        pairs = zip(self._copies, mine.tolist(), strict=True)
        held = {copy.key: value for copy, value in pairs if copy.key in keys}
        everyone = comm.gather_objects((self._mesh.where, held), self._mesh.world)
        return describe([where for where, _ in everyone], [found for _, found in everyone])

    def _message(self, iteration: int, found: Sequence[str]) -> str:
        more = f"; and {len(found) - SHOWN} more" if found[SHOWN:] else ""
        since = f"after iteration {self._passed}" if self._passed else "since the start of this run"
        return (
            f"iteration {iteration}: copies of weights that must be equal differ: "
            f"{'; '.join(found[:SHOWN])}{more}. It happened {since}, so nothing is saved: go on "
            "from a checkpoint of before, without the device of a rank that stands alone"
        )


def _copies(parameter: nn.Parameter) -> list[_Copy]:
    record = sharding.of(parameter)
    tied, replicas = ("ends",) if record.tied else (), "edp" if record.expert else "dp_cp"
    return [
        _Copy((record.name, region.logical), (replicas, *region.replicated, *tied))
        for region in record.regions
    ]


def fingerprint(x: Tensor) -> Tensor:
    """Return an int64 scalar that any change of one element changes, whatever it is.

    Other changes go unseen with a chance of 1 in 2^64 or so: every element's bits are multiplied by
    an odd number of its place, and the products are summed modulo 2^64, in which their order does
    not matter.
    """
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    bits = x.detach().contiguous().flatten().view(integer)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        # The high half reaches the low one: twice 2^63, two flipped signs, would be nothing.
        part = part ^ ((part >> 32) & _LOW)
        places = torch.arange(start, start + len(part), device=x.device)
        total += (part * ((places * _FACTOR) | 1)).sum()
    return total


def describe(places: Sequence[str], held: Sequence[Mapping[_Key, int]]) -> list[str]:
    """Return a line for each region: which ranks stand against which.

    Args:
        places: coordinates of every rank.
        held: of every rank the hashes of the regions that it holds, among those that differ.
    """
    holders: dict[_Key, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, found in enumerate(held):
        for key, value in found.items():
            holders[key][value].append(rank)

    def listed(ranks: Sequence[int]) -> str:
        return ", ".join(f"{places[rank]} (rank {rank})" for rank in ranks)

    lines = []
    for (name, box), by_value in holders.items():
        camps = sorted(by_value.values(), key=len, reverse=True)
        where = "" if len({b for n, b in holders if n == name}) == 1 else f" {list(box)}"
        if len(camps[0]) > len(camps[1]):
            odd = sorted(rank for camp in camps[1:] for rank in camp)
            text = f"{listed(odd)} against {len(camps[0])} others that agree"
        else:
            text = " against ".join(listed(camp) for camp in sorted(camps))
        lines.append(f"{name}{where}: {text}")
    return lines
