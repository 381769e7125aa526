"""Processes under a memory limit: what does not fit one trains on four that share everything out.

The model's weights, gradients and Adam states take four times its weights, 288 MiB, on one process.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import Pool
from tests.programs import launch, metrics

RUN = (
    "--num-layers 6 --hidden-size 512 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--max-position-embeddings 16 --global-batch-size 4 --lr 1e-3 --mock-data --log-interval 1 "
    "--tokenizer-type NullTokenizer --vocab-size 60 --train-iters 2 --eval-iters 0 --device cpu "
    "--num-workers 0 --metrics-file metrics.jsonl --log-memory-interval 2"
)
ROOM = 200 << 20
"""Bytes: four processes do with 160 MiB, one needs more than 288 MiB."""
STRATEGY = "--data-parallel-sharding-strategy optim_grads_params"


@pytest.fixture
def fresh() -> Iterator[Pool]:
    """Workers of this test alone: in those of all, malloc may hold free what others had."""
    with Pool(preload=["tests.end_to_end.limited_program"]) as workers:
        yield workers


def test_four_processes_train_what_one_cannot_hold(fresh: Pool, tmp_path: Path) -> None:
    for name in ("one", "four"):
        (tmp_path / name).mkdir()
    module = "tests.end_to_end.limited_program"
    (one,) = launch(fresh, 1, module, ROOM, *RUN.split(), folder=tmp_path / "one")
    assert one.code == 1
    lines = one.err.splitlines()
    assert lines[0].startswith("[rank 0] error: out of memory in building the model: ")
    assert "can't allocate memory" in lines[0]
    assert "states 144.88 MiB, weights 72.44 MiB, gradients 72.44 MiB" in lines[2]
    assert re.search(r"under RLIMIT_DATA of \d+\.\d\d [MG]iB there is room for about ", lines[2])
    # What a rank of two would have, fits by the plan already.
    fits = rf"  it fits on [24] processes with {STRATEGY} \(\d+\.\d\d MiB each\)"
    assert re.match(fits, lines[-1])

    words = [*RUN.split(), *STRATEGY.split()]
    four = launch(fresh, 4, module, ROOM, *words, folder=tmp_path / "four")
    assert [rank.code for rank in four] == [0] * 4
    *rows, memory = metrics(tmp_path / "four" / "metrics.jsonl")
    assert len(rows) == 2 and rows[1]["lm_loss"] < rows[0]["lm_loss"]
    # A fourth of each, padded to whole shares.
    held, planned = memory["measured_bytes"], memory["planned_bytes"]
    for name, on_one in (("weights", 75.96e6), ("gradients", 75.96e6), ("states", 151.92e6)):
        assert held[name] == planned[name] < 1.01 * on_one / 4
    assert held["communication"] == planned["communication"]
