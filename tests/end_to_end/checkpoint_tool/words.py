"""Words for tools/checkpoint.py, and damage for it to find."""

from collections.abc import Callable
from pathlib import Path

from tests.programs import ROOT
from tests.unit.hub_files import (
    LLAMA,
)

TRAIN = (
    "--use-checkpoint-args --seq-length 16 --micro-batch-size 1 --lr 1e-3 --mock-data --device cpu "
    "--eval-iters 0 --num-workers 0 --log-interval 1"
)


NULL = ("--tokenizer-type", "NullTokenizer", "--vocab-size", str(LLAMA["vocab_size"] - 1))


Tool = Callable[..., int]


def flip(folder: Path, offset: int = 40) -> None:
    """Change a bit of the first file of a checkpoint."""
    path = min(folder.glob("*.bin"))
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(bytes(data))


MCORE = ROOT / "tests" / "data" / "mcore_trajectories" / "llama" / "dist_ckpt_iter5"
