"""States of every update rule in checkpoints: resumed bit for bit, and read by any other layout."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.core.dist_checkpointing.reader import Checkpoint
from tests.harness import Pool
from tests.programs import assert_rows_equal, launch, metrics

COMMON = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --swiglu "
    "--position-embedding-type rope --group-query-attention --num-query-groups 2 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 31 --attention-dropout 0 "
    "--hidden-dropout 0 --micro-batch-size 1 --global-batch-size 12 --lr 1e-2 --train-iters 4 "
    "--save-interval 2 --eval-iters 0 --log-interval 1 --num-workers 0 --fp64 --device cpu"
)
RULES = {
    "adam": "",
    "muon": "--optimizer muon --muon-nesterov --decoupled-lr 3e-2 --decoupled-min-lr 1e-2",
    "lion": "--optimizer muon --muon-scalar-optimizer lion",
}
SHARED = "--use-distributed-optimizer"


def train(pool: Pool, world: int, words: str, folder: Path, *more: object) -> str:
    """Run in a folder of its own and return what rank 0 printed."""
    folder.mkdir()
    common = f"{COMMON} {words} --metrics-file metrics.jsonl --save save".split()
    ended = launch(pool, world, "pretrain_gpt", *common, *more, folder=folder)
    assert [one.code for one in ended] == [0] * world, ended[0].err
    return ended[0].out


def stored(folder: Path) -> dict[str, Tensor]:
    """Return the weights and optimizer states of the last checkpoint."""
    with Checkpoint(folder / "save" / "iter_0000004") as checkpoint:
        keys = [key for key in checkpoint.index.tensors if not key.startswith("random.")]
        return {key: checkpoint.read(key) for key in keys}


def assert_continues(found: Path, expected: Path) -> None:
    """Compare what iterations 3 and 4 said, and the last checkpoint, to 1e-10."""
    later = [row for row in metrics(expected / "metrics.jsonl") if row["iteration"] > 2]
    assert_rows_equal(metrics(found / "metrics.jsonl"), later)
    ours, theirs = stored(found), stored(expected)
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        largest = float(tensor.abs().max())
        torch.testing.assert_close(ours[key], tensor, rtol=0, atol=1e-10 * largest)


def test_muon_goes_on_bit_for_bit_and_as_one_process(pool: Pool, tmp_path: Path) -> None:
    layout = f"{RULES['muon']} {SHARED} --tensor-model-parallel-size 2"
    whole, parts, serial = (tmp_path / name for name in ("whole", "parts", "serial"))
    printed = train(pool, 4, layout, whole)
    matrices = "muon decay (muon): 8 parameters"
    assert f"optimizer group {matrices}" in printed
    assert "optimizer group adam decay decoupled (adam, --decoupled-lr): 1 parameters" in printed
    assert "| learning rate: 7.500000E-03 | decoupled learning rate: 2.500000E-02 |" in printed
    kinds = {key.rsplit(".", 6)[0] for key in stored(whole) if ".mlp.linear_fc1.weight" in key}
    assert kinds == {"model", "optimizer.momentum_buffer"}
    source = ("--load", whole / "save", "--ckpt-step", 2)
    train(pool, 4, layout, parts, *source)
    later = [row for row in metrics(whole / "metrics.jsonl") if row["iteration"] > 2]
    assert metrics(parts / "metrics.jsonl") == later
    ours, theirs = stored(parts), stored(whole)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    train(pool, 1, RULES["muon"], serial, *source)
    assert_continues(serial, whole)


@pytest.mark.parametrize(
    "rule", ["muon", *(pytest.param(r, marks=pytest.mark.slow) for r in ("adam", "lion"))]
)
def test_ckpt_05_states_of_four_replicas_are_read_by_three(
    pool: Pool, tmp_path: Path, rule: str
) -> None:
    """Each of four had a share; three have other ones, and other matrices."""
    words = f"{RULES[rule]} {SHARED}"
    four, three = tmp_path / "four", tmp_path / "three"
    train(pool, 4, words, four)
    train(pool, 3, words, three, "--load", four / "save", "--ckpt-step", 2)
    assert_continues(three, four)
