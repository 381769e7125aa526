"""How long a collective waits: the limit of the run holds for every group, and can be lowered."""

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core import comm
from megatron.core.grid import ParallelConfig
from megatron.core.mesh import GroupOptions, Mesh
from tests.harness import Pool


def mesh_with(limit: timedelta) -> Mesh:
    layout = ParallelConfig.resolve(tensor_model_parallel_size=2)
    return Mesh.create(layout, torch.device("cpu"), options=GroupOptions(timeout=limit))


def limits(rank: int) -> set[Any]:
    mesh = mesh_with(timedelta(seconds=17))
    groups = [axis.group for name, axis in mesh.axes.items() if axis.group and name != "world"]
    assert groups
    return {group._get_backend(torch.device("cpu")).options._timeout for group in groups}


def test_every_group_has_the_limit_of_the_run(pool: Pool) -> None:
    """Groups do not take the world's by themselves."""
    assert pool.run(2, limits) == [{timedelta(seconds=17)}] * 2


def waits(rank: int, axis: str) -> float:
    mesh = mesh_with(timedelta(seconds=50))
    x = torch.ones(3)
    comm.all_reduce(x, mesh[axis])
    mesh.limit_waiting(timedelta(seconds=1))
    dist.barrier()
    seconds = 0.0
    if rank == 1:
        time.sleep(4)
    else:
        start = time.perf_counter()
        with pytest.raises(RuntimeError, match="(?i)time"):
            comm.all_reduce(x, mesh[axis])
        seconds = time.perf_counter() - start
    dist.destroy_process_group()  # what timed out cannot be used again
    return seconds


@pytest.mark.parametrize("axis", ["tp", "world"])
def test_a_lowered_limit_holds_for_groups_that_are_there(axis: str, pool: Pool) -> None:
    seconds, _ = pool.run(2, waits, axis)
    assert 0.9 < seconds < 4
