"""The text of a dry run: what its sections say, and that a large world is planned quickly."""

from pathlib import Path

import numpy as np

from megatron.core.datasets.indexed import IndexedDatasetBuilder
from megatron.training.arguments import parse
from megatron.training.plan_report import report

RUN = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 2 "
    "--train-iters 25 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 50 --dry-run"
)


def corpus(prefix: Path, documents: int, length: int) -> str:
    builder = IndexedDatasetBuilder(str(prefix), np.uint16)
    for number in range(documents):
        builder.add_document(np.arange(number, number + length, dtype=np.uint16) % 50)
    builder.finalize()
    return str(prefix)


def data_lines(*more: object) -> list[str]:
    """Return the plan's lines on data, in single spaces."""
    text = report(parse([*RUN.split(), *map(str, more)]), "pretrain_gpt")
    section = text.split("\ndata:\n")[1].split("\n\n")[0]
    return [" ".join(line.split()) for line in section.splitlines()]


def test_every_split_of_a_corpus(tmp_path: Path) -> None:
    """10 documents of 20 tokens in shares of 8, 1, 1; 50 training samples of 8 read 400."""
    prefix = corpus(tmp_path / "a", documents=10, length=20)
    lines = data_lines("--data-path", prefix, "--split", "80,10,10", "--eval-iters", 5)
    assert lines == [
        f"train 100.00% 50 samples 160 tokens/epoch 2.500 epochs {prefix}",
        f"valid 100.00% 10 samples 20 tokens/epoch 4.000 epochs {prefix}",
        f"test 100.00% 10 samples 20 tokens/epoch 4.000 epochs {prefix}",
    ]


def test_a_blend_by_its_weights(tmp_path: Path) -> None:
    first = corpus(tmp_path / "a", documents=10, length=20)
    second = corpus(tmp_path / "b", documents=20, length=20)
    words = ("--train-data-path", 3, first, 1, second, "--train-iters", 50, "--eval-iters", 0)
    lines = data_lines(*words)
    assert lines == [
        f"train 75.00% 75 samples 200 tokens/epoch 3.000 epochs {first}",
        f"train 25.00% 25 samples 400 tokens/epoch 0.500 epochs {second}",
    ]


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "a", documents=10, length=20)
    lines = data_lines("--data-path", prefix, "--split", "0,1,0", "--eval-iters", 1)
    assert lines[-1] == "no training data: a run is refused"
    (line,) = data_lines("--train-data-path", tmp_path / "x", "--eval-iters", 0)
    assert line == f"train 100.00% 50 samples absent tokens/epoch ? epochs {tmp_path / 'x'}"
