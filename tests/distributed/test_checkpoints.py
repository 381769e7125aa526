"""Checkpoints of several ranks: resumed on the same layout bit for bit, on another as one process.

Whole runs of pretrain_gpt.py on ranks of the worker pool, with made-up tokens.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.core.dist_checkpointing.load import Checkpoint
from tests.harness import Pool
from tests.programs import assert_rows_equal, launch, metrics

# A tied, padded vocabulary, and fewer query groups than the most tensor-parallel ranks.
COMMON = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --swiglu "
    "--position-embedding-type rope --group-query-attention --num-query-groups 2 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 101 --make-vocab-size-divisible-by 3 "
    "--micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --train-iters 4 --eval-iters 1 "
    "--eval-interval 2 --log-interval 1 --num-workers 0 --fp64 --device cpu"
)
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
LAYOUTS = {
    "serial": (1, ""),
    "tp2 pp2": (4, f"{TP2} {PP2} --sequence-parallel"),
    "pp2 v": (2, f"{PP2} --pipeline-schedule zb-v"),
    "tp4": (4, "--tensor-model-parallel-size 4"),
    "pp2 vpp2 dp2": (4, f"{PP2} --num-virtual-stages-per-pipeline-rank 2 --overlap-grad-reduce"),
    "cp2 dp2": (4, "--context-parallel-size 2"),
}


def train(pool: Pool, layout: str, folder: Path, *more: object) -> str:
    """Run on a layout, add to the folder's metrics, and return what rank 0 printed."""
    folder.mkdir(exist_ok=True)
    world, words = LAYOUTS[layout]
    common = f"{COMMON} {words} --metrics-file metrics.jsonl --save save".split()
    ended = launch(pool, world, "pretrain_gpt", *common, *more, folder=folder)
    assert [one.code for one in ended] == [0] * world
    return ended[0].out


def stored(folder: Path, iteration: int) -> dict[str, Tensor]:
    """Return the weights and optimizer states of a checkpoint."""
    with Checkpoint(folder / "save" / f"iter_{iteration:07d}") as checkpoint:
        keys = [key for key in checkpoint.index.tensors if not key.startswith("random.")]
        return {key: checkpoint.read(key) for key in keys}


@pytest.fixture(scope="module")
def straight(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of one process that nothing interrupted."""
    folder = tmp_path_factory.mktemp("straight")
    train(pool, "serial", folder, *NO_DROPOUT.split(), "--save-interval", 2)
    return folder


def assert_equal(found: Path, expected: Path) -> None:
    """Compare metrics, and the weights and states of the last checkpoint, to 1e-10."""
    assert_rows_equal(metrics(found / "metrics.jsonl"), metrics(expected / "metrics.jsonl"))
    ours, theirs = stored(found, 4), stored(expected, 4)
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        largest = float(tensor.abs().max())
        torch.testing.assert_close(ours[key], tensor, rtol=0, atol=1e-10 * largest)


@pytest.mark.parametrize("layout", ["tp2 pp2", "pp2 v", "cp2 dp2"])
def test_the_same_layout_goes_on_bit_for_bit_with_dropout(
    pool: Pool, tmp_path: Path, layout: str
) -> None:
    dropout = ("--attention-dropout", 0.1, "--hidden-dropout", 0.1)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(pool, layout, whole, *dropout)
    train(pool, layout, parts, *dropout, "--exit-interval", 2)
    printed = train(pool, layout, parts, *dropout, "--load", "save")
    assert "weights loaded, optimizer loaded, random loaded, progress loaded" in printed
    assert metrics(parts / "metrics.jsonl") == metrics(whole / "metrics.jsonl")
    ours, theirs = stored(parts, 4), stored(whole, 4)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("tp2 pp2", "serial"),
        ("pp2 v", "cp2 dp2"),
        ("tp4", "pp2 vpp2 dp2"),
        ("pp2 vpp2 dp2", "tp2 pp2"),
        ("serial", "pp2 v"),
    ],
)
def test_another_layout_goes_on_as_one_process(
    pool: Pool, straight: Path, tmp_path: Path, before: str, after: str
) -> None:
    train(pool, before, tmp_path, *NO_DROPOUT.split(), "--exit-interval", 2)
    kept = stored(tmp_path, 2)
    assert {key: tuple(tensor.shape) for key, tensor in kept.items()} == {
        key: tuple(tensor.shape) for key, tensor in stored(straight, 2).items()
    }
    printed = train(pool, after, tmp_path, *NO_DROPOUT.split(), "--load", "save")
    assert "weights loaded, optimizer loaded" in printed
    assert_equal(tmp_path, straight)
