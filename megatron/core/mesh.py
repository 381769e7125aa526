"""The mesh: each axis of the grid bound to a process group, and the device all work runs on.

A `Mesh` is passed to whatever communicates. Axes of size 1 have no group, and every collective is a
no-op on them, so the serial model is the parallel model on `Mesh.serial`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.core.grid import ParallelConfig

# The axes of each grid, and the joint ones that some sum runs over.
DENSE_AXES = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "pp": ("pp",),
    "dp_cp": ("dp", "cp"),
}
EXPERT_AXES = {"etp": ("etp",), "ep": ("ep",), "edp": ("edp",)}


@dataclass(frozen=True)
class Axis:
    """One axis as this rank sees it."""

    name: str
    ranks: tuple[int, ...]
    """Global ranks along the axis, in coordinate order; this rank is one of them."""
    coordinate: int
    group: dist.ProcessGroup | None
    """None for size 1: there is nobody to talk to."""

    @property
    def size(self) -> int:
        """Return the number of ranks along the axis."""
        return len(self.ranks)


class Mesh:
    """Every axis of one run, and its device."""

    tp: Axis
    """Ranks that share each layer's matrices."""
    cp: Axis
    """Ranks that share a sequence."""
    dp: Axis
    """Replicas, which see different samples."""
    pp: Axis
    """Stages, first to last."""
    etp: Axis
    """Ranks that share each expert's matrices."""
    ep: Axis
    """Ranks among which a layer's experts are spread."""
    edp: Axis
    """Replicas of the experts."""
    dp_cp: Axis
    """Ranks that see different tokens: gradients are summed over them."""
    world: Axis
    """All ranks."""

    def __init__(self, axes: dict[str, Axis], rank: int, device: torch.device) -> None:
        self.axes = axes
        self.rank = rank
        self.device = device
        for name, axis in axes.items():
            setattr(self, name, axis)

    def __getitem__(self, name: str) -> Axis:
        """Return the axis called ``name``."""
        return self.axes[name]

    @property
    def where(self) -> str:
        """Return this rank's coordinates as they stand before a log line: ``[pp1 dp0 tp3]``."""
        shown = [self.axes[name] for name in ("pp", "dp", "cp", "tp")]
        parts = [f"{axis.name}{axis.coordinate}" for axis in shown if axis.size > 1]
        return f"[{' '.join(parts)}]" if parts else f"[rank {self.rank}]"

    @classmethod
    def serial(cls, device: str | torch.device = "cpu") -> "Mesh":
        """Return the mesh of one process: every axis has size 1 and no group."""
        names = [*DENSE_AXES, *EXPERT_AXES, "world"]
        return cls({name: Axis(name, (0,), 0, None) for name in names}, 0, torch.device(device))

    @classmethod
    def create(cls, config: ParallelConfig, device: torch.device) -> "Mesh":
        """Make every process group of this run; a collective of the whole world.

        ``torch.distributed`` is initialised already. Groups are made in one fixed order on every
        rank, each with its peers on all ranks, since making one is a collective of the world.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        dense, expert = config.grids(world_size)
        axes = {}
        for grid, joint in ((dense, DENSE_AXES), (expert, EXPERT_AXES)):
            for name, members in joint.items():
                axes[name] = bind(name, grid.groups(*members), rank)
        everyone = tuple(range(world_size))
        world_group = dist.group.WORLD if world_size > 1 else None
        axes["world"] = Axis("world", everyone, rank, world_group)
        return cls(axes, rank, device)


def bind(name: str, groups: Sequence[tuple[int, ...]], rank: int) -> Axis:
    """Make the process groups of one axis, and return it as ``rank`` sees it.

    A collective of the whole world: every rank must bind the same axes in the same order, each with
    all of its groups in one order, whether it is in them or not.

    Args:
        name: of the axis.
        groups: the global ranks of each group, in coordinate order; they part the world.
        rank: this process's.
    """
    mine = next(ranks for ranks in groups if rank in ranks)
    group = None
    if len(mine) > 1:
        for ranks in groups:
            made = dist.new_group(list(ranks))
            if ranks == mine:
                group = made
    return Axis(name, mine, mine.index(rank), group)
