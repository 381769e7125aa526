"""examples/minimal_loop.py: a loop of one's own gives one process's losses on TP 2 x DP 2."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.core import rng, sharding
from megatron.core.grid import ParallelConfig
from megatron.core.mesh import Axis, Mesh
from megatron.core.sharding import Init
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.utils import UserError

ROOT = Path(__file__).resolve().parents[2]
STEPS = 6
PLACES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def losses(launcher: list[str], *flags: str, cwd: Path) -> list[float]:
    """Run the example as its first lines say, from a folder that is not the repository."""
    environment = {k: v for k, v in os.environ.items() if k not in PLACES}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(
        [*launcher, str(ROOT / "examples" / "minimal_loop.py"), "--steps", str(STEPS), *flags],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    rows = re.findall(r"^step (\d+): loss (\S+)$", ran.stdout, re.MULTILINE)
    assert [int(step) for step, _ in rows] == [*range(1, STEPS + 1)], ran.stdout
    return [float(loss) for _, loss in rows]


def test_tensor_2_data_2_gives_the_losses_of_one_process(tmp_path: Path) -> None:
    serial = losses([sys.executable], "--fp64", cwd=tmp_path)
    # Bytes of text: nothing is known of them at first, much after a few steps.
    assert serial[0] == pytest.approx(math.log(256), rel=0.02)
    assert serial[-1] < serial[0] - 0.5
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    parallel = losses([*torchrun, "--nproc-per-node=4"], "--tp", "2", "--fp64", cwd=tmp_path)
    assert parallel == pytest.approx(serial, rel=1e-12)


def test_one_process_needs_no_process_group() -> None:
    mesh = Mesh.create(ParallelConfig.resolve(), torch.device("cpu"))
    assert {axis.size for axis in mesh.axes.values()} == {1}
    layout = ParallelConfig.resolve(tensor_model_parallel_size=2)
    with pytest.raises(UserError, match="--tensor-model-parallel-size"):
        Mesh.create(layout, torch.device("cpu"))


def test_layers_of_ones_own_are_named_when_they_are_initialised() -> None:
    """Two matrices of one shape that had no names would be drawn from one key, and be equal."""
    mesh = Mesh.serial()
    twins = torch.nn.ModuleList(
        RowParallelLinear.even(8, 8, mesh, torch.float32, Init("normal", 1.0)) for _ in range(2)
    )
    rng.initialize(twins, 1234)
    assert [sharding.of(p).name for p in twins.parameters()][::2] == ["0.weight", "1.weight"]
    assert not torch.equal(twins[0].weight, twins[1].weight)


def test_even_layers_compute_their_product_and_cut_each_part_evenly() -> None:
    mesh, init = Mesh.serial(), Init("normal", 1.0)
    column = ColumnParallelLinear.even(4, 6, mesh, torch.float64, init, parts=3)
    row = RowParallelLinear.even(6, 4, mesh, torch.float64, init, bias=False)
    model = torch.nn.Sequential(column, row)
    rng.initialize(model, 1)
    x = torch.randn(5, 2, 4, dtype=torch.float64)
    expected = x @ column.weight.T @ row.weight.T
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)
    assert row.bias is None and column.bias is not None
    # Queries, keys and values are rows 0-1, 2-3 and 4-5: the second of two ranks has one of each.
    tp = Axis("tp", (0, 1), 1, None)
    second = Mesh({**mesh.axes, "tp": tp}, 1, mesh.device)
    half = ColumnParallelLinear.even(4, 6, second, torch.float64, init, parts=3)
    assert half.weight.shape == (3, 4)
    regions = sharding.of(half.weight).regions
    assert [region.logical[0] for region in regions] == [(1, 2), (3, 4), (5, 6)]
    narrow = RowParallelLinear.even(6, 4, second, torch.float64, init)
    assert narrow.weight.shape == (4, 3)
    assert [r.logical for r in sharding.of(narrow.weight).regions] == [((0, 4), (3, 6))]
