"""The mesh: each axis of the grid bound to a process group, and the device all work runs on.

A `Mesh` is passed to whatever communicates. Axes of size 1 have no group, and every collective is a
no-op on them, so the serial model is the parallel model on `Mesh.serial`.
"""

import itertools
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Literal

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
EXPERT_AXES = {"etp": ("etp",), "ep": ("ep",), "edp": ("edp_inner", "edp")}
# Parts of an axis: neighbouring coordinates (near) or one run of neighbours apart (far).
PART_AXES = ("kv_replica", "cp_inner", "cp_outer", "ends")


Overlap = Literal["ring", "symmetric"]


@dataclass(frozen=True)
class GroupOptions:
    """What the process groups of a mesh are made with."""

    timeout: timedelta | None = None
    """How long a collective waits for an answer; None for torch's own limit."""
    nccl: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By axis, fields of NCCL's configuration and ``is_high_priority_stream``; for NCCL alone."""

    def arguments(self, axis: str) -> dict[str, Any]:
        """Return what `dist.new_group` takes for the groups of an axis."""
        # Without a limit of its own a group gets torch's default, not that of the world.
        given: dict[str, Any] = {"timeout": self.timeout, "group_desc": axis}
        settings = self.nccl.get(axis)
        if settings:
            given["pg_options"] = _nccl_options(settings, self.timeout)
        return given


def _nccl_options(settings: Mapping[str, Any], timeout: timedelta | None) -> Any:
    fields = dict(settings)
    options = dist.ProcessGroupNCCL.Options(
        is_high_priority_stream=fields.pop("is_high_priority_stream", False)
    )
    for name, value in fields.items():
        setattr(options.config, name, value)
    if timeout is not None:
        options._timeout = timeout  # torch warns where the two differ
    return options


@dataclass(frozen=True)
class Axis:
    """One axis as this rank sees it."""

    name: str
    ranks: tuple[int, ...]
    """Global ranks along the axis, in coordinate order; this rank is one of them."""
    coordinate: int
    group: dist.ProcessGroup | None
    """None for size 1: there is nobody to talk to."""
    overlap: Overlap | None = None
    """How collectives run beside the products they belong to (`tensor_parallel.overlap`)."""

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
    kv_replica: Axis
    """Neighbours along ``tp`` that hold the same key and value heads: there are fewer query groups
    than tensor-parallel ranks."""
    cp_inner: Axis
    """Neighbours along ``cp`` that trade heads for positions in a two-level scheme."""
    cp_outer: Axis
    """Ranks along ``cp`` between which keys travel in a two-level scheme."""
    ends: Axis
    """The first and the last rank along ``pp``, which both hold a tied embedding; the ranks between
    them are alone."""
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
    def alone(self) -> Axis:
        """Return an axis of this rank only: what is done over it needs nobody else."""
        return Axis("alone", (self.rank,), 0, None)

    @property
    def where(self) -> str:
        """Return this rank's coordinates as they stand before a log line: ``[pp1 dp0 tp3]``."""
        shown = [self.axes[name] for name in ("pp", "dp", "cp", "tp")]
        parts = [f"{axis.name}{axis.coordinate}" for axis in shown if axis.size > 1]
        return f"[{' '.join(parts)}]" if parts else f"[rank {self.rank}]"

    def limit_waiting(self, timeout: timedelta) -> None:
        """Let every collective from now on wait for an answer no longer than ``timeout``."""
        for axis in self.axes.values():
            if axis.group is not None:
                dist.distributed_c10d._set_pg_timeout(timeout, axis.group)

    @classmethod
    def serial(cls, device: str | torch.device = "cpu") -> "Mesh":
        """Return the mesh of one process: every axis has size 1 and no group."""
        names = [*DENSE_AXES, *EXPERT_AXES, *PART_AXES, "world"]
        return cls({name: Axis(name, (0,), 0, None) for name in names}, 0, torch.device(device))

    @classmethod
    def create(
        cls,
        config: ParallelConfig,
        device: torch.device,
        *,
        num_query_groups: int | None = None,
        cp_inner_size: int = 1,
        options: GroupOptions = GroupOptions(),
    ) -> "Mesh":
        """Make every process group of this run; a collective of the whole world.

        ``torch.distributed`` is initialised already, or there is one process. Groups are made in
        one fixed order on every rank, each with its peers on all ranks, since making one is a
        collective of the world.

        Args:
            config: the layout.
            device: of this rank.
            num_query_groups: of the model: fewer than tensor-parallel ranks are shared by some.
            cp_inner_size: neighbours along ``cp`` that an all-to-all joins, in a two-level scheme.
            options: time limits and NCCL's settings.
        """
        if not dist.is_initialized():
            config.grids(1)  # refuses a layout of several ranks
            return cls.serial(device)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        dense, expert = config.grids(world_size)
        axes = {}
        for grid, joint in ((dense, DENSE_AXES), (expert, EXPERT_AXES)):
            for name, members in joint.items():
                axes[name] = bind(name, grid.groups(*members), rank, options)
        tp, cp = config.tensor_model_parallel_size, config.context_parallel_size
        sharers = tp // min(tp, num_query_groups or tp)
        for name, groups in (
            ("kv_replica", near(dense.groups("tp"), sharers)),
            ("cp_inner", near(dense.groups("cp"), cp_inner_size)),
            ("cp_outer", far(dense.groups("cp"), cp_inner_size if cp_inner_size > 1 else cp)),
            ("ends", ends(dense.groups("pp"))),
        ):
            axes[name] = bind(name, groups, rank, options)
        if config.tp_comm_overlap and config.sequence_parallel and tp > 1:
            axes["tp"] = replace(axes["tp"], overlap=choose_overlap(axes["tp"], device))
        _connect(axes["pp"], device)
        everyone = tuple(range(world_size))
        world_group = dist.group.WORLD if world_size > 1 else None
        axes["world"] = Axis("world", everyone, rank, world_group)
        return cls(axes, rank, device)


def bind(
    name: str,
    groups: Sequence[tuple[int, ...]],
    rank: int,
    options: GroupOptions = GroupOptions(),
) -> Axis:
    """Make the process groups of one axis, and return it as ``rank`` sees it.

    A collective of the whole world: every rank must bind the same axes in the same order, each with
    all of its groups in one order, whether it is in them or not.

    Args:
        name: of the axis.
        groups: the global ranks of each group, in coordinate order; they part the world. Groups
            of one rank need no process group.
        rank: this process's.
        options: what the groups are made with.
    """
    mine = next(ranks for ranks in groups if rank in ranks)
    group = None
    for ranks in groups:
        if len(ranks) > 1:
            made = dist.new_group(list(ranks), **options.arguments(name))
            if ranks == mine:
                group = made
    return Axis(name, mine, mine.index(rank), group)


def choose_overlap(axis: Axis, device: torch.device) -> Overlap:
    """Return the best way to overlap collectives with products on an axis.

    Symmetric memory is for CUDA devices of one machine that reach each other's memory, and ranks
    that NCCL connects; everything else forms a ring. A collective of the axis, on CUDA: its ranks
    choose alike.
    """
    if device.type != "cuda" or dist.get_backend(axis.group) != "nccl":
        return "ring"
    count = torch.cuda.device_count()
    pairs = itertools.permutations(range(count), 2)
    # Fewer devices than ranks: each process is shown its own alone, and torch tells them apart by
    # their numbers.
    reach = axis.size <= count and all(
        torch.cuda.can_device_access_peer(one, other) for one, other in pairs
    )
    mine = (socket.gethostname(), reach)
    everyone: list[tuple[str, bool]] = [mine] * axis.size
    dist.all_gather_object(everyone, mine, group=axis.group)
    if len(set(everyone)) > 1 or not mine[1]:
        return "ring"
    from torch.distributed import _symmetric_memory  # noqa: F401  (defines the operators)

    return "symmetric"


def _connect(axis: Axis, device: torch.device) -> None:
    """Let the ranks of an axis meet now, where NCCL would leave that to their first call.

    All of them must take part in that one, and a pipeline's first call is a transfer between two.
    """
    if device.type == "cuda" and axis.group is not None and dist.get_backend(axis.group) == "nccl":
        dist.all_reduce(torch.zeros(1, device=device), group=axis.group)


def near(groups: Sequence[tuple[int, ...]], size: int) -> list[tuple[int, ...]]:
    """Return runs of ``size`` neighbours of each group.

    >>> near([(0, 1, 2, 3)], 2)
    [(0, 1), (2, 3)]
    """
    return [ranks[i : i + size] for ranks in groups for i in range(0, len(ranks), size)]


def far(groups: Sequence[tuple[int, ...]], size: int) -> list[tuple[int, ...]]:
    """Return the ranks of each group that stand ``size`` coordinates apart.

    >>> far([(0, 1, 2, 3)], 2)
    [(0, 2), (1, 3)]
    """
    return [ranks[i::size] for ranks in groups for i in range(size)]


def ends(groups: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the first and last rank of each group, and each of the others alone.

    >>> ends([(0, 1, 2)])
    [(0, 2), (1,)]
    """
    return [
        part
        for ranks in groups
        for part in [(ranks[0], ranks[-1]) if len(ranks) > 1 else ranks, *zip(ranks[1:-1])]
    ]
