"""pretrain_gpt.py started by each launcher: two processes find their places and each other.

srun and mpirun are not here: the test sets the variables that they document.
"""

import importlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.harness import Pool
from tests.programs import ROOT, free_port

RUN = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --vocab-size 64 "
    "--tokenizer-type NullTokenizer --mock-data --micro-batch-size 1 --global-batch-size 2 "
    "--train-iters 2 --lr 1e-3 --eval-iters 0 --log-interval 1 --num-workers 0 --device cpu "
    "--tensor-model-parallel-size 2"
)
CLUSTER = (
    "--distributed-timeout-minutes 2 --distributed-timeout-seconds-after-init 60 "
    "--high-priority-stream-groups tp --flight-recorder-dump-path trace_"
)
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "SLURM_", "OMPI_", "PMI_", "MPI_")


def by_hand(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2"}


def srun(rank: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "3",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
    }


def mpirun(rank: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }


def hydra(rank: int) -> dict[str, str]:
    return {
        "PMI_RANK": str(rank),
        "PMI_SIZE": "2",
        "MPI_LOCALRANKID": str(rank),
        "MPI_LOCALNRANKS": "2",
    }


LAUNCHERS: Mapping[str, Callable[[int], dict[str, str]]] = {
    "RANK and WORLD_SIZE": by_hand,
    "srun": srun,
    "mpirun": mpirun,
    "mpirun of MPICH": hydra,
}


def plain_environment() -> dict[str, str]:
    return {name: v for name, v in os.environ.items() if not name.startswith(VARIABLES)}


def started(rank: int, launcher: str, words: list[str], port: int) -> tuple[int, str]:
    """Return the exit code and what was printed."""
    dist.destroy_process_group()  # the harness's own: a program makes its group itself
    variables = {**plain_environment(), **LAUNCHERS[launcher](rank), "MASTER_PORT": str(port)}
    os.environ.clear()
    os.environ.update(variables, OMP_NUM_THREADS="1")
    sys.path[:] = list(dict.fromkeys([str(ROOT), *sys.path]))
    out = io.StringIO()
    with redirect_stdout(out):
        code = importlib.import_module("pretrain_gpt").main(words)
    return code, out.getvalue()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_processes_of_a_launcher_train_together(
    launcher: str, pool: Pool, tmp_path: Path
) -> None:
    words = [*RUN.split(), *CLUSTER.split(), "--metrics-file", str(tmp_path / "metrics.jsonl")]
    (code, said), other = pool.run(2, started, launcher, words, free_port(), timeout=120.0)
    assert code == 0 and other == (0, "")
    assert f"launch: 2 processes ({launcher.partition(' of ')[0]}), meeting at" in said
    assert "--high-priority-stream-groups (with --device cpu NCCL is not used)" in said
    assert "--flight-recorder-dump-path (with --device cpu NCCL is not used)" in said
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows if "split" not in row] == [1, 2]


def test_a_layout_that_cannot_work_ends_before_processes_meet(tmp_path: Path) -> None:
    """One of two is started: the other is not there, and is not waited for."""
    program = [sys.executable, str(ROOT / "pretrain_gpt.py")]
    variables = {**srun(0), "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*program, *RUN.split(), "--tensor-model-parallel-size", "3"],
        env={**plain_environment(), **variables},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 2
    message = ended.stderr
    assert "--tensor-model-parallel-size 3 (flag)" in message and "this works: " in message
    assert "Traceback" not in message and message.count("\n") == 1
