"""Rank arithmetic against Megatron's published order and by properties of partitions."""

import itertools
import math

import pytest

from megatron.core.grid import Grid, ParallelConfig, divisions, runs_met
from megatron.core.utils import UserError


def test_megatrons_example_of_sixteen_ranks() -> None:
    """TP2 PP4 on 16 ranks, the worked example of Megatron's documentation."""
    dense, _ = ParallelConfig.resolve(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=4
    ).grids(16)
    assert dense.groups("tp") == [(i, i + 1) for i in range(0, 16, 2)]
    assert dense.groups("pp") == [(i, i + 4, i + 8, i + 12) for i in range(4)]
    assert dense.groups("dp") == [
        (0, 2),
        (1, 3),
        (4, 6),
        (5, 7),
        (8, 10),
        (9, 11),
        (12, 14),
        (13, 15),
    ]


def test_the_pipeline_may_come_before_the_data_axis() -> None:
    config = ParallelConfig.resolve(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, use_tp_pp_dp_mapping=True
    )
    assert config.grids(8)[0].groups("pp") == [(0, 2), (1, 3), (4, 6), (5, 7)]


@pytest.mark.parametrize("axes", [("tp",), ("dp", "pp"), ("tp", "dp", "pp"), ("cp", "tp")])
def test_groups_partition_the_world(axes: tuple[str, ...]) -> None:
    grid = Grid({"tp": 2, "cp": 3, "dp": 2, "pp": 2})
    groups = grid.groups(*axes)
    assert sorted(itertools.chain(*groups)) == list(range(24))
    for group in groups:
        fixed = {tuple(c for a, c in grid.coordinates(r).items() if a not in axes) for r in group}
        assert len(fixed) == 1


def test_groups_are_compared_without_counting_a_large_world() -> None:
    for order in itertools.permutations(("tp", "cp", "pp")):
        grid = Grid({"tp": 2, "pp": 3, "cp": 2})
        other = Grid({axis: grid.sizes[axis] for axis in order})
        assert grid.divides_alike("pp", other) == (grid.groups("pp") == other.groups("pp"))
    assert not Grid({"pp": 2, "dp": 3}).divides_alike("pp", Grid({"pp": 3, "dp": 2}))
    config = ParallelConfig.resolve(pipeline_model_parallel_size=2, expert_model_parallel_size=5)
    assert config.grids(10_000_000)[1].sizes["edp"] == 1_000_000


def test_the_first_axis_varies_fastest() -> None:
    grid = Grid({"tp": 2, "cp": 3, "pp": 4})
    ranks = [c["tp"] + 2 * c["cp"] + 6 * c["pp"] for c in map(grid.coordinates, range(24))]
    assert ranks == list(range(24))


def test_a_world_that_does_not_divide_names_every_factor() -> None:
    config = ParallelConfig.resolve(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=3, context_parallel_size=2
    )
    with pytest.raises(UserError) as caught:
        config.data_parallel_size(8)
    for part in ("world size (8)", "parallel-size (2)", "parallel-size (3)", "multiple of 12"):
        assert part in str(caught.value)


def test_expert_and_dense_pipelines_must_agree() -> None:
    config = ParallelConfig.resolve(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        expert_model_parallel_size=4,
        expert_tensor_parallel_size=1,
        use_tp_pp_dp_mapping=True,
    )
    with pytest.raises(UserError, match="pipelines would differ"):
        config.grids(8)


@pytest.mark.parametrize(("tp", "cp", "dp", "etp"), [(1, 2, 1, 1), (2, 2, 3, 2), (4, 1, 2, 2)])
def test_experts_may_have_replicas_before_the_stages(tp: int, cp: int, dp: int, etp: int) -> None:
    """Stages before replicas, and fewer ranks per expert than per dense layer."""
    config = ParallelConfig.resolve(
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        pipeline_model_parallel_size=2,
        expert_tensor_parallel_size=etp,
        use_tp_pp_dp_mapping=True,
    )
    world = tp * cp * dp * 2
    dense, expert = config.grids(world)
    assert expert.groups("pp") == dense.groups("pp")
    # Two ranks hold the same part of the experts if they differ in nothing but replicas.
    replicas = expert.groups("edp_inner", "edp")
    assert {len(group) for group in replicas} == {world // etp // 2}
    for group in replicas:
        assert len({rank % etp for rank in group}) == 1
        assert len({dense.coordinates(rank)["pp"] for rank in group}) == 1


def test_parts_of_axes_are_neighbours_and_ranks_apart() -> None:
    config = ParallelConfig.resolve(tensor_model_parallel_size=2, context_parallel_size=4)
    parted = divisions(config, 16, num_query_groups=1, cp_inner_size=2, optimizer_instances=2)
    assert parted["kv_replica"].groups() == parted["tp"].groups()
    assert parted["cp"].groups()[0] == (0, 2, 4, 6)
    assert parted["cp_inner"].groups()[:2] == [(0, 2), (4, 6)]
    assert parted["cp_outer"].groups()[:2] == [(0, 4), (2, 6)]
    # Neighbours share out a whole set, of which each instance of the optimizer has one.
    assert parted["dp_cp"].groups() == [tuple(range(0, 16, 2)), tuple(range(1, 16, 2))]
    assert parted["dp_inner"].groups() == [
        (0, 2, 4, 6),
        (8, 10, 12, 14),
        (1, 3, 5, 7),
        (9, 11, 13, 15),
    ]
    assert parted["dp_outer"].groups()[:2] == [(0, 8), (2, 10)]
    alone = divisions(config, 16)
    assert "dp_inner" not in alone
    assert {alone[name].size for name in ("dp_outer", "cp_inner", "cp_outer", "kv_replica")} == {1}


@pytest.mark.parametrize("mapping", [False, True])
@pytest.mark.parametrize("pp", [1, 2, 3])
def test_sizes_are_those_of_the_listed_groups(pp: int, mapping: bool) -> None:
    config = ParallelConfig.resolve(
        tensor_model_parallel_size=4,
        context_parallel_size=2,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=2,
        use_tp_pp_dp_mapping=mapping,
    )
    world = 16 * pp
    parted = divisions(config, world, num_query_groups=2, cp_inner_size=2, optimizer_instances=4)
    for name, axis in parted.items():
        groups = axis.groups()
        assert sorted(itertools.chain(*groups)) == list(range(world)), name
        assert max(map(len, groups)) == axis.size, name
        assert name == "ends" or {len(group) for group in groups} == {axis.size}, name


def test_sizes_of_a_large_world_are_had_without_its_ranks() -> None:
    parted = divisions(ParallelConfig.resolve(), 10**12, optimizer_instances=10)
    assert (parted["dp_inner"].size, parted["dp_outer"].size) == (10**11, 10)


@pytest.mark.parametrize(
    ("tp", "cp", "ep", "etp"),
    [
        *((tp, cp, ep, 1) for tp in (1, 2, 3, 4) for cp in (1, 2, 3) for ep in (1, 2, 3, 5, 8)),
        (4, 1, 3, 2),
        (3, 1, 2, 2),
    ],
)
def test_groups_of_experts_meet_as_many_microbatches_as_are_counted(
    tp: int, cp: int, ep: int, etp: int
) -> None:
    """Brute force: the ranks of a dense replica's tp x cp share the tokens of a microbatch."""
    config = ParallelConfig.resolve(
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    dense, expert = config.grids(math.lcm(tp * cp, etp * ep) * 2)
    sharers = {rank: group for group in dense.groups("tp", "cp") for rank in group}
    met = max(len({sharers[rank] for rank in group}) for group in expert.groups("etp", "ep"))
    assert runs_met(etp * ep, tp * cp) == met
