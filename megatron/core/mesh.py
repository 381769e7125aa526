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

from megatron.core.grid import ParallelConfig, divisions, place

TURNS = (
    ("tp", "etp", "etp_ep", "kv_replica"),
    ("cp", "cp_inner", "cp_outer"),
    ("dp", "dp_cp", "edp", "dp_inner", "edp_inner", "dp_outer", "edp_outer"),
    ("pp", "ends"),
    ("ep", "etp_ep"),
)
"""Axes that take turns: where the ranks of two in a line are the same, one process group serves
both. What is started on a group runs in that order, so work that shall run beside other work needs
a group of its own, whoever the ranks are: the sums of gradients beside a ring of attention, say."""

Overlap = Literal["ring", "symmetric"]


@dataclass(frozen=True)
class GroupOptions:
    """What the process groups of a mesh are made with."""

    timeout: timedelta | None = None
    """How long a collective waits for an answer; None for torch's own limit."""
    nccl: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By axis, fields of NCCL's configuration and ``is_high_priority_stream``; for NCCL alone."""

    def arguments(self, *axes: str) -> dict[str, Any]:
        """Return what `dist.new_group` takes for the groups of axes with equal settings."""
        # Without a limit of its own a group gets torch's default, not that of the world.
        given: dict[str, Any] = {"timeout": self.timeout, "group_desc": "+".join(axes)}
        settings = self.nccl.get(axes[0])
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
    etp_ep: Axis
    """Ranks that hold all experts of a layer together, and among which its tokens travel."""
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
    dp_inner: Axis
    """Neighbours along ``dp_cp`` that share out a whole set of what replicas hold; with one
    instance of the optimizer ``dp_cp`` itself, which is counted under that name."""
    dp_outer: Axis
    """Ranks along ``dp_cp`` that hold the same share, one of each instance of the optimizer."""
    edp_inner: Axis
    """As ``dp_inner``, of the replicas of experts; with one instance ``edp`` itself."""
    edp_outer: Axis
    """As ``dp_outer``, of the replicas of experts; with one instance each is alone."""
    ends: Axis
    """The first and the last rank along ``pp``, which both hold a tied embedding; the ranks between
    them are alone."""
    world: Axis
    """All ranks."""

    def __init__(self, axes: dict[str, Axis], rank: int, device: torch.device) -> None:
        self.axes = axes
        """Each once: without those that there are for several instances of the optimizer."""
        self.rank = rank
        self.device = device
        self.buffers: dict[str, Any] = {}
        """What packages keep for groups of this mesh, by package: one, whoever asks first."""
        alone = {"edp_inner": axes["edp"], "edp_outer": self.alone}
        self._named = {"dp_inner": axes["dp_cp"], **alone, **axes}
        for name, axis in self._named.items():
            setattr(self, name, axis)

    def __getitem__(self, name: str) -> Axis:
        """Return the axis called ``name``."""
        return self._named[name]

    @property
    def alone(self) -> Axis:
        """Return an axis of this rank only: what is done over it needs nobody else."""
        return Axis("alone", (self.rank,), 0, None)

    @property
    def where(self) -> str:
        """Return this rank's coordinates as they stand before a log line: ``[pp1 dp0 tp3]``."""
        sizes = {name: axis.size for name, axis in self.axes.items()}
        return place(self.rank, sizes, {name: axis.coordinate for name, axis in self.axes.items()})

    def limit_waiting(self, timeout: timedelta) -> None:
        """Let every collective from now on wait for an answer no longer than ``timeout``."""
        for axis in self.axes.values():
            if axis.group is not None:
                dist.distributed_c10d._set_pg_timeout(timeout, axis.group)

    @classmethod
    def serial(cls, device: str | torch.device = "cpu") -> "Mesh":
        """Return the mesh of one process: every axis has size 1 and no group."""
        names = [*divisions(ParallelConfig.resolve(), 1), "world"]
        return cls({name: Axis(name, (0,), 0, None) for name in names}, 0, torch.device(device))

    @classmethod
    def create(
        cls,
        config: ParallelConfig,
        device: torch.device,
        *,
        num_query_groups: int | None = None,
        cp_inner_size: int = 1,
        optimizer_instances: int = 1,
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
            optimizer_instances: whole sets of what replicas share out.
            options: time limits and NCCL's settings.
        """
        if not dist.is_initialized():
            config.grids(1)  # refuses a layout of several ranks
            return cls.serial(device)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        parted = divisions(
            config,
            world_size,
            num_query_groups=num_query_groups,
            cp_inner_size=cp_inner_size,
            optimizer_instances=optimizer_instances,
        )
        axes = bind({name: axis.groups() for name, axis in parted.items()}, rank, options)
        if config.tp_comm_overlap and config.sequence_parallel and axes["tp"].size > 1:
            axes["tp"] = replace(axes["tp"], overlap=choose_overlap(axes["tp"], device))
        _connect(axes["pp"], device)
        everyone = tuple(range(world_size))
        world_group = dist.group.WORLD if world_size > 1 else None
        axes["world"] = Axis("world", everyone, rank, world_group)
        return cls(axes, rank, device)


def bind(
    parted: Mapping[str, Sequence[tuple[int, ...]]],
    rank: int,
    options: GroupOptions = GroupOptions(),
) -> dict[str, Axis]:
    """Make the process groups of all axes, and return the axes as ``rank`` sees them.

    A collective of the whole world: every rank must bind the same axes in the same order, each with
    all of its groups in one order, whether it is in them or not. Axes that take turns (`TURNS`)
    share process groups where ranks and options are equal.

    Args:
        parted: of each axis the global ranks of each group, in coordinate order; they part the
            world. Groups of one rank need no process group.
        rank: this process's.
        options: what the groups are made with.
    """
    sharing: list[list[str]] = []
    for name in parted:
        for others in sharing:
            if _takes_turns(name, others[0], parted, options):
                others.append(name)
                break
        else:
            sharing.append([name])
    axes: dict[str, Axis] = {}
    for names in sharing:
        groups = parted[names[0]]
        mine = next(ranks for ranks in groups if rank in ranks)
        group = None
        for ranks in groups:
            if len(ranks) > 1:
                made = dist.new_group(list(ranks), **options.arguments(*names))
                if ranks == mine:
                    group = made
        axes |= {name: Axis(name, mine, mine.index(rank), group) for name in names}
    return {name: axes[name] for name in parted}


def _takes_turns(
    name: str,
    other: str,
    parted: Mapping[str, Sequence[tuple[int, ...]]],
    options: GroupOptions,
) -> bool:
    return (
        any({name, other} <= set(line) for line in TURNS)
        and sorted(parted[name]) == sorted(parted[other])
        and options.nccl.get(name, {}) == options.nccl.get(other, {})
    )


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
