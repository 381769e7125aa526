"""The tiny models of the examples with an encoder learn on two processes, as they do on one."""

from pathlib import Path

import pytest

from tests.example_scripts import run_script, write_recorder
from tests.harness import Pool
from tests.programs import Rows, assert_rows_equal, launch, metrics

EXAMPLES = ["bert", "t5"]


def train(pool: Pool, folder: Path, example: str, processes: int, *more: str) -> Rows:
    """Return what a run of the script's flags logs; the ranks are the pool's, not torchrun's."""
    program = f"pretrain_{example}"
    told = {"PYTHON": write_recorder(folder), "GPUS": str(processes)}
    # Epsilon is far above rounding, or Adam would make steps of it.
    exact = ("--fp64", "--adam-eps", "1e-4", "--log-interval", "1")
    started = run_script(f"{example}/tiny.sh", *exact, *more, **told).stdout.splitlines()
    assert started[started.index("--nproc-per-node") + 1] == str(processes)
    log = folder / f"{processes}.jsonl"
    words = [*started[started.index(f"{program}.py") + 1 :], "--metrics-file", str(log)]
    ended = launch(pool, processes, program, *words, "--num-workers", "0", folder=folder)
    assert [one.code for one in ended] == [0] * processes, ended[0].err
    return metrics(log)


@pytest.mark.parametrize("example", EXAMPLES)
def test_two_processes_train_as_one_does(pool: Pool, tmp_path: Path, example: str) -> None:
    some = ("--exit-interval", "6")
    halves = train(pool, tmp_path, example, 2, *some)
    assert len(halves) == 6
    whole = train(pool, tmp_path, example, 1, "--tensor-model-parallel-size", "1", *some)
    assert_rows_equal(halves, whole)


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES)
def test_they_learn(pool: Pool, tmp_path: Path, example: str) -> None:
    losses = [row["lm_loss"] for row in train(pool, tmp_path, example, 2)]
    assert sum(losses[-5:]) < 0.65 * sum(losses[:5])
