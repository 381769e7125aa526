"""How long a collective waits: the limit of the run holds for every group, and can be lowered."""

import time
from datetime import timedelta
from pathlib import Path
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


def waits(rank: int, axis: str, given_up: Path) -> float:
    mesh = mesh_with(timedelta(seconds=50))
    x = torch.ones(3)
    comm.all_reduce(x, mesh[axis])
    mesh.limit_waiting(timedelta(seconds=1))
    dist.barrier()
    seconds = 0.0
    if rank == 1:
        # Stays away until the other has given up. Were it to wait for the 50 seconds, this one
        # would end before, with an error.
        for _ in range(400):
            if given_up.exists():
                break
            time.sleep(0.1)
        assert given_up.exists(), "the other still waits"
    else:
        start = time.perf_counter()
        with pytest.raises(RuntimeError, match="(?i)time"):
            comm.all_reduce(x, mesh[axis])
        seconds = time.perf_counter() - start
        given_up.touch()
    dist.destroy_process_group()  # what timed out cannot be used again
    return seconds


@pytest.mark.parametrize("axis", ["tp", "world"])
def test_a_lowered_limit_holds_for_groups_that_are_there(
    axis: str, pool: Pool, tmp_path: Path
) -> None:
    seconds, _ = pool.run(2, waits, axis, tmp_path / "given_up")
    assert seconds > 0.9
