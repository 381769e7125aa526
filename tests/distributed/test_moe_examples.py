"""The tiny models of the examples with experts learn on two processes, as they do on one."""

from pathlib import Path

import pytest

from tests.example_scripts import run_script, write_recorder
from tests.harness import Pool
from tests.programs import Rows, assert_rows_equal, launch, metrics

ITERATIONS = 8
# Epsilon is far above rounding, or Adam would make steps of it.
EXACT = f"--fp64 --moe-router-dtype fp64 --adam-eps 1e-4 --train-iters {ITERATIONS}"


def train(pool: Pool, folder: Path, script: str, processes: int, *more: str) -> Rows:
    """Return what a run of the script's flags logs; the ranks are the pool's, not torchrun's."""
    told = {"PYTHON": write_recorder(folder), "GPUS": str(processes)}
    started = run_script(script, *EXACT.split(), *more, **told).stdout.splitlines()
    program = started.index("pretrain_gpt.py")
    assert started[started.index("--nproc-per-node") + 1] == str(processes)
    log = folder / f"{processes}.jsonl"
    words = [*started[program + 1 :], "--metrics-file", str(log), "--num-workers", "0"]
    ended = launch(pool, processes, "pretrain_gpt", *words, folder=folder)
    assert [one.code for one in ended] == [0] * processes, ended[0].err
    return metrics(log)


@pytest.mark.parametrize("script", ["mixtral/tiny.sh", "qwen3_moe/tiny.sh"])
def test_two_processes_with_half_of_the_experts_each_learn_as_one_does(
    pool: Pool, tmp_path: Path, script: str
) -> None:
    halves = train(pool, tmp_path, script, 2)
    losses = [row["lm_loss"] for row in halves]
    assert len(losses) == ITERATIONS
    assert losses[-1] < 0.8 * losses[0]
    whole = train(pool, tmp_path, script, 1, "--expert-model-parallel-size", "1")
    assert_rows_equal(halves, whole)
