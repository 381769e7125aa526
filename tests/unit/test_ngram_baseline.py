"""The baselines against counts done by hand."""

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets.indexed import IndexedDatasetBuilder

TOOL = Path(__file__).parent.parent.parent / "tools" / "ngram_baseline.py"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, TOOL, *map(str, arguments)], capture_output=True, text=True
    )


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Training 0 1 0 1 0 1 0 1 0 1, validation 0 1."""
    with IndexedDatasetBuilder(tmp_path / "c", np.uint16) as builder:
        for _ in range(5):
            builder.add_document([0, 1])
        builder.add_document([0, 1])
        builder.finalize()
    return tmp_path / "c"


def test_hand_counted_losses(corpus: Path) -> None:
    """Unigram (5+1)/(10+3) for both tokens; after 0 always comes 1, at most at weight 0.98."""
    done = run("--data-path", corpus, "--split", "5,1", "--vocab-size", 3)
    assert done.returncode == 0, done.stderr
    assert f"unigram    {-math.log(6 / 13):.4f}" in done.stdout
    assert f"bigram     {-math.log(0.98 + 0.02 * 6 / 13):.4f}" in done.stdout


def test_a_run_is_judged(corpus: Path, tmp_path: Path) -> None:
    metrics = tmp_path / "m.jsonl"
    for loss, code in ((0.001, 0), (0.5, 1)):
        metrics.write_text(f'{{"iteration": 1, "split": "valid", "lm_loss": {loss}}}\n')
        done = run(
            *("--data-path", corpus, "--split", "5,1", "--vocab-size", 3),
            *("--metrics-file", metrics),
        )
        assert done.returncode == code


def test_ids_beyond_the_vocabulary_are_refused(corpus: Path) -> None:
    done = run("--data-path", corpus, "--split", "5,1", "--vocab-size", 1)
    assert done.returncode == 2 and "holds token 1" in done.stderr
