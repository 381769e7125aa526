"""Rank arithmetic: where a rank stands on every axis, in plain Python.

`ParallelConfig` holds the sizes that a user chooses, `Grid` arranges ranks by named axes. A dense
grid serves attention and MLP, a second one over the same ranks serves experts; both must agree
about pipeline neighbours. Axes are ordered as in Megatron, fastest-varying first. `divisions` lists
every axis that anything is communicated over: what a dry run prices and what `mesh` binds.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from megatron.core.config import Config, check_at_least, option
from megatron.core.utils import UserError


class Grid:
    """``world_size`` ranks arranged by named axes; the first axis varies fastest.

    >>> grid = Grid({"tp": 2, "dp": 2, "pp": 2})
    >>> grid.coordinates(5)
    {'tp': 1, 'dp': 0, 'pp': 1}
    >>> grid.peers(5, "tp", "pp")
    (0, 1, 4, 5)
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = dict(sizes)
        self.world_size = math.prod(self.sizes.values())
        self._strides: dict[str, int] = {}
        stride = 1
        for axis, size in self.sizes.items():
            self._strides[axis] = stride
            stride *= size

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of ``rank`` on every axis."""
        return {axis: rank // self._strides[axis] % size for axis, size in self.sizes.items()}

    def peers(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` only along ``axes``, in grid order."""
        # Slowest axis first, so that the product counts up in rank order.
        ordered = [axis for axis in reversed(self.sizes) if axis in axes]
        here = self.coordinates(rank)
        base = rank - sum(here[axis] * self._strides[axis] for axis in ordered)
        steps = product(
            *(range(0, self.sizes[a] * self._strides[a], self._strides[a]) for a in ordered)
        )
        return tuple(base + sum(step) for step in steps)

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Return every group along ``axes``: a partition of the world, by first rank."""
        others = [axis for axis in reversed(self.sizes) if axis not in axes]
        steps = product(
            *(range(0, self.sizes[a] * self._strides[a], self._strides[a]) for a in others)
        )
        return [self.peers(sum(step), *axes) for step in steps]

    def divides_alike(self, axis: str, other: "Grid") -> bool:
        """Return whether the groups along ``axis`` are those of another grid of the same world.

        A group is ``size`` ranks that are ``stride`` apart, so both say all of it.
        """
        size = self.sizes[axis]
        if size != other.sizes[axis]:
            return False
        return size == 1 or self._strides[axis] == other._strides[axis]


def place(rank: int, sizes: Mapping[str, int], coordinates: Mapping[str, int]) -> str:
    """Return a rank's coordinates as they stand before a log line: ``[pp1 dp0 tp3]``."""
    parts = [f"{axis}{coordinates[axis]}" for axis in ("pp", "dp", "cp", "tp") if sizes[axis] > 1]
    return f"[{' '.join(parts)}]" if parts else f"[rank {rank}]"


class ParallelConfig(Config):
    """How many ways each kind of work is split over the ranks."""

    tensor_model_parallel_size: int = option(1)
    """Ways each layer's weight matrices are split (TP)."""

    pipeline_model_parallel_size: int = option(1)
    """Stages the layer stack is cut into (PP)."""

    context_parallel_size: int = option(1)
    """Ways the sequence is split (CP)."""

    expert_model_parallel_size: int = option(1)
    """Ways the experts of a layer are spread over ranks (EP)."""

    expert_tensor_parallel_size: int = option(derived="--tensor-model-parallel-size")
    """Ways each expert's matrices are split (ETP)."""

    sequence_parallel: bool = option(False)
    """Split activations along the sequence between tensor-parallel regions."""

    tp_comm_overlap: bool = option(False)
    """Cut tensor-parallel collectives into pieces that run beside their matrix products, with
    --sequence-parallel."""

    use_tp_pp_dp_mapping: bool = option(False)
    """Order ranks tensor, context, pipeline, data instead of tensor, context, data, pipeline."""

    @classmethod
    def derive(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Let experts be split as the dense layers are."""
        return {"expert_tensor_parallel_size": values["tensor_model_parallel_size"]}

    def __post_init__(self) -> None:
        check_at_least(
            self,
            1,
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
        )

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one replica of the dense layers, context parallelism included."""
        return (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.context_parallel_size
        )

    def data_parallel_size(self, world_size: int) -> int:
        """Return the number of replicas in a world.

        Raises:
            UserError: the world is no multiple of TP x PP x CP.
        """
        replica = self.model_parallel_size
        if world_size % replica:
            raise UserError(
                f"world size ({world_size}) is not divisible by {replica} = "
                f"--tensor-model-parallel-size ({self.tensor_model_parallel_size}) x "
                f"--pipeline-model-parallel-size ({self.pipeline_model_parallel_size}) x "
                f"--context-parallel-size ({self.context_parallel_size}); "
                f"launch a multiple of {replica} processes or lower one of these"
            )
        return world_size // replica

    def grids(self, world_size: int) -> tuple[Grid, Grid]:
        """Return the dense and the expert grid of a world.

        Raises:
            UserError: a size does not divide the world, or the two grids would disagree about
                pipeline neighbours.
        """
        dp, pp = self.data_parallel_size(world_size), self.pipeline_model_parallel_size
        tp, cp = self.tensor_model_parallel_size, self.context_parallel_size
        etp, ep = self.expert_tensor_parallel_size, self.expert_model_parallel_size
        if world_size % (etp * ep * pp):
            raise UserError(
                f"world size ({world_size}) is not divisible by {etp * ep * pp} = "
                f"--expert-tensor-parallel-size ({etp}) x --expert-model-parallel-size ({ep}) x "
                f"--pipeline-model-parallel-size ({pp})"
            )
        edp = world_size // (etp * ep * pp)
        if self.use_tp_pp_dp_mapping:
            dense = {"tp": tp, "cp": cp, "pp": pp, "dp": dp}
            expert = {"etp": etp, "ep": ep, "pp": pp, "edp": edp}
            if tp * cp % (etp * ep) == 0:
                # Experts have more replicas than the dense layers: some of them stand where the
                # dense grid has its tensor and context axes, before the stages.
                inner = tp * cp // (etp * ep)
                expert = {"etp": etp, "ep": ep, "edp_inner": inner, "pp": pp, "edp": dp}
        else:
            dense = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
            expert = {"etp": etp, "ep": ep, "edp": edp, "pp": pp}
        grids = Grid(dense), Grid(expert)
        if not grids[0].divides_alike("pp", grids[1]):
            raise UserError(
                f"--use-tp-pp-dp-mapping: --tensor-model-parallel-size ({tp}) x "
                f"--context-parallel-size ({cp}) must be a multiple of "
                f"--expert-tensor-parallel-size ({etp}) x --expert-model-parallel-size ({ep}), or "
                "the pipelines would differ; leave out --use-tp-pp-dp-mapping"
            )
        return grids


Groups = Iterable[Sequence[int]]


def whole(groups: Groups) -> Iterator[Sequence[int]]:
    """Return the groups as they are."""
    yield from groups


class Division(NamedTuple):
    """How one axis parts the world into groups."""

    grid: Grid
    along: tuple[str, ...]
    """Axes of the grid whose ranks one group joins, before it is parted."""
    part: Callable[[Groups], Iterator[Sequence[int]]] = whole
    """What is made of those groups; the first it makes of one is the largest."""

    @property
    def size(self) -> int:
        """Return the ranks of the largest group, without listing a large world."""
        ways = math.prod(self.grid.sizes.get(axis, 1) for axis in self.along)
        return len(next(self.part([range(ways)])))

    def groups(self) -> list[tuple[int, ...]]:
        """Return every group: a partition of the world, each in coordinate order."""
        return [tuple(ranks) for ranks in self.part(self.grid.groups(*self.along))]


def divisions(
    config: ParallelConfig,
    world_size: int,
    *,
    num_query_groups: int | None = None,
    cp_inner_size: int = 1,
    optimizer_instances: int = 1,
) -> dict[str, Division]:
    """Return how each axis of `mesh.Mesh` but ``world`` parts the ranks, in one fixed order.

    There are a ``dp_inner``, an ``edp_inner`` and an ``edp_outer`` only where there are several
    instances of the optimizer: else what the first two would be is ``dp_cp`` and ``edp``.

    Args:
        config: the layout.
        world_size: number of ranks.
        num_query_groups: of the model; None for as many as heads.
        cp_inner_size: neighbours along ``cp`` that an all-to-all joins, in a two-level scheme.
        optimizer_instances: runs of neighbours along ``dp_cp``, and along ``edp``, that each hold a
            whole set of what replicas share out; a divisor of the size of the first, and of the
            second, or experts have no instances.

    Raises:
        UserError: the layout does not fit the world (`ParallelConfig.grids`).
    """
    dense, expert = config.grids(world_size)
    cp = config.context_parallel_size
    sharers = key_value_sharers(config.tensor_model_parallel_size, num_query_groups)
    ring = cp_inner_size if cp_inner_size > 1 else cp
    replicas = dense.sizes["dp"] * cp
    assert replicas % optimizer_instances == 0, (replicas, optimizer_instances)
    share = replicas // optimizer_instances
    inner = {"dp_inner": Division(dense, ("dp", "cp"), lambda groups: near(groups, share))}
    edp, by_experts = Division(expert, ("edp_inner", "edp")), dict[str, Division]()
    if optimizer_instances > 1 and edp.size % optimizer_instances == 0:
        part = edp.size // optimizer_instances
        by_experts = {
            "edp_inner": edp._replace(part=lambda groups: near(groups, part)),
            "edp_outer": edp._replace(part=lambda groups: far(groups, part)),
        }
    return {
        "tp": Division(dense, ("tp",)),
        "kv_replica": Division(dense, ("tp",), lambda groups: near(groups, sharers)),
        "cp": Division(dense, ("cp",)),
        "cp_inner": Division(dense, ("cp",), lambda groups: near(groups, cp_inner_size)),
        "cp_outer": Division(dense, ("cp",), lambda groups: far(groups, ring)),
        "dp": Division(dense, ("dp",)),
        "dp_cp": Division(dense, ("dp", "cp")),
        **(inner if optimizer_instances > 1 else {}),
        "dp_outer": Division(dense, ("dp", "cp"), lambda groups: far(groups, share)),
        "pp": Division(dense, ("pp",)),
        "ends": Division(dense, ("pp",), ends),
        "etp": Division(expert, ("etp",)),
        "ep": Division(expert, ("ep",)),
        "etp_ep": Division(expert, ("etp", "ep")),
        "edp": edp,
        **by_experts,
    }


def key_value_sharers(tp: int, num_query_groups: int | None) -> int:
    """Return how many neighbours along ``tp`` hold the same key and value heads."""
    return tp // min(tp, num_query_groups or tp)


def runs_met(group: int, run: int) -> int:
    """Return how many runs of ``run`` ranks a group of ``group`` neighbours meets at most.

    Runs and groups both part the same ranks from the first on, so that a group may start inside a
    run, at any multiple of their common divisor.

    >>> runs_met(group=3, run=4)  # ranks 3, 4 and 5 are in two of 0-3, 4-7 and 8-11
    2
    """
    return 1 + -(-(group - math.gcd(group, run)) // run)


def near(groups: Groups, size: int) -> Iterator[Sequence[int]]:
    """Return runs of ``size`` neighbours of each group.

    >>> list(near([(0, 1, 2, 3)], 2))
    [(0, 1), (2, 3)]
    """
    for ranks in groups:
        yield from (ranks[i : i + size] for i in range(0, len(ranks), size))


def far(groups: Groups, size: int) -> Iterator[Sequence[int]]:
    """Return the ranks of each group that stand ``size`` coordinates apart.

    >>> list(far([(0, 1, 2, 3)], 2))
    [(0, 2), (1, 3)]
    """
    for ranks in groups:
        yield from (ranks[i::size] for i in range(size))


def ends(groups: Groups) -> Iterator[Sequence[int]]:
    """Return the first and last rank of each group, and each of the others alone.

    >>> list(ends([(0, 1, 2)]))
    [(0, 2), (1,)]
    """
    for ranks in groups:
        yield (ranks[0], ranks[-1]) if len(ranks) > 1 else ranks
        yield from zip(ranks[1:-1])
