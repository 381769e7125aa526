"""The tiny models of the examples with experts learn on two processes, as they do on one."""

from pathlib import Path

import pytest

from tests.example_scripts import run_script, write_recorder
from tests.harness import Pool
from tests.programs import Rows, assert_rows_equal, launch, metrics

ITERATIONS = 8
# Epsilon is far above rounding, or Adam would make steps of it.
EXACT = f"--fp64 --moe-router-dtype fp64 --adam-eps 1e-4 --train-iters {ITERATIONS}"


# The flags of a large run at a size that a CPU has room for, with several buckets as it has.
SMALL = (
    "--num-layers 2 --hidden-size 16 --ffn-hidden-size 24 --num-attention-heads 4 "
    "--num-query-groups 2 --seq-length 16 --padded-vocab-size 64 --global-batch-size 4 --lr 1e-2 "
    "--lr-warmup-iters 0 --vocab-size 63 --eval-iters 0 --ddp-num-buckets 3 --no-bf16"
)


def train(
    pool: Pool, folder: Path, script: str, processes: int, *more: str, **variables: str
) -> Rows:
    """Return what a run of the script's flags logs; the ranks are the pool's, not torchrun's."""
    told = {"PYTHON": write_recorder(folder), "GPUS": str(processes), **variables}
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


def test_the_layout_of_mixtral_on_one_machine_trains_as_one_process_does(
    pool: Pool, tmp_path: Path
) -> None:
    """Two of its eight processes: both have half of each sample and half of the experts."""

    def run(processes: int) -> Rows:
        sizes = (f"--{kind}-parallel-size" for kind in ("context", "expert-model"))
        told = {"NODES": "1", "DATA": "mock", "SAVE": str(tmp_path / str(processes))}
        layout = [word for flag in sizes for word in (flag, str(processes))]
        script = "mixtral/8x7b.sh"
        return train(pool, tmp_path, script, processes, *SMALL.split(), *layout, **told)

    shared, alone = run(2), run(1)
    assert len(shared) == ITERATIONS
    assert_rows_equal(shared, alone)
