"""The process groups that a plan names, against those that ranks make."""

import pytest
import torch
import torch.distributed as dist

from megatron.core import comm
from megatron.core.grid import ParallelConfig
from megatron.core.mesh import Mesh
from megatron.training.arguments import parse
from megatron.training.config import RunConfig
from megatron.training.processes import setup
from tests.harness import Pool

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --micro-batch-size 2 "
    "--train-iters 10 --lr 1e-3 --mock-data --vocab-size 100 --dry-run --dry-run-world-size 8"
)


def made(rank: int, run: RunConfig) -> dict[str, int]:
    mesh = setup.connected_mesh(run, torch.device("cpu"))
    for name, axis in mesh.axes.items():
        # A group has the ranks of each of the axes that share it.
        if axis.group is not None:
            assert tuple(dist.get_process_group_ranks(axis.group)) == axis.ranks, name
            assert (dist.get_rank(axis.group), axis.name) == (axis.coordinate, name)
        else:
            assert axis.ranks == (rank,), name
    return {name: axis.size for name, axis in mesh.axes.items()}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "--tensor-model-parallel-size 4 --group-query-attention --num-query-groups 2 "
        "--pipeline-model-parallel-size 2",
        "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 "
        "2 --pipeline-model-parallel-size 2",
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping",
        "--pipeline-model-parallel-size 4",
        "--use-distributed-optimizer --num-distributed-optimizer-instances 4",
    ],
)
def test_a_plan_has_the_axes_of_the_mesh(pool: Pool, text: str) -> None:
    run = parse(f"{SMALL} {text}".split()).config
    sizes = run.axis_sizes
    for axes in pool.run(8, made, run):
        between = axes["ends"] == 1 < sizes["ends"]  # they are alone
        assert axes == (sizes | {"ends": 1} if between else sizes)


def shared(rank: int) -> list[bool]:
    """Return which of the pairs below share a process group."""
    layout = ParallelConfig.resolve(context_parallel_size=2)
    mesh = Mesh.create(layout, torch.device("cpu"), cp_inner_size=2)
    assert mesh.dp_inner is mesh["dp_inner"] is mesh.dp_cp and mesh.dp_outer.size == 1
    for number, axis in enumerate((mesh.dp_cp, mesh.edp, mesh.cp, mesh.cp_inner, mesh.dp)):
        with comm.counting() as traffic:
            x = torch.tensor([rank + number])
            comm.all_reduce(x, axis)
        assert x.item() == sum(axis.ranks) + number * axis.size
        assert set(traffic.calls) == {(axis.name, "all_reduce")}
    pairs = [("dp_cp", "edp"), ("cp", "cp_inner"), ("dp", "dp_cp"), ("dp_cp", "world")]
    return [mesh[a].group is mesh[b].group for a, b in pairs]


def test_axes_that_take_turns_share_a_group_of_the_same_ranks(pool: Pool) -> None:
    assert pool.run(4, shared) == [[True, True, False, False]] * 4


def one_replica(rank: int) -> tuple[bool, bool]:
    mesh = Mesh.create(ParallelConfig.resolve(context_parallel_size=2), torch.device("cpu"))
    assert mesh.cp.ranks == mesh.dp_cp.ranks == mesh.world.ranks
    return mesh.cp.group is mesh.dp_cp.group, mesh.dp_cp.group is mesh.edp.group


def test_a_ring_does_not_wait_for_sums_of_gradients(pool: Pool) -> None:
    """The ranks are the same, but both shall be under way at once."""
    assert pool.run(2, one_replica) == [(False, True)] * 2
