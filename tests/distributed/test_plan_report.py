"""The process groups that a plan names, against those that ranks make."""

import pytest
import torch

from megatron.training.arguments import parse
from megatron.training.config import RunConfig
from megatron.training.plan.report import group_sizes
from megatron.training.processes import setup
from tests.harness import Pool

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --micro-batch-size 2 "
    "--train-iters 10 --lr 1e-3 --mock-data --vocab-size 100 --dry-run --dry-run-world-size 8"
)


def made(rank: int, run: RunConfig) -> dict[str, int]:
    mesh = setup.connected_mesh(run, torch.device("cpu"))
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
    ],
)
def test_group_sizes_are_those_of_the_mesh(pool: Pool, text: str) -> None:
    run = parse(f"{SMALL} {text}".split()).config
    sizes = group_sizes(run)
    for axes in pool.run(8, made, run):
        assert {name: axes[name] for name in sizes} == sizes
        # Ranks between the ends of a pipeline are alone; here there are none.
        assert all(size == 1 for name, size in axes.items() if name not in sizes)
