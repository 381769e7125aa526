"""Runs of Megatron-core's go on from its files on several ranks, on the batches that it had.

Losses and gradient norms are those of its own run (see `test_gpt_trajectories`), which went on on
one rank in fp32.
"""

import itertools
import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.harness import Pool
from tests.programs import launch, metrics
from tests.unit.test_gpt_trajectories import CASES, DATA, expected_loss
from tests.unit.test_megatron_formats import save_legacy

LAYOUTS = {
    "dp2": (2, "--use-distributed-optimizer"),
    "tp2": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "tp2-pp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
}
CONTINUED = [name for name in CASES if (DATA / name / "dist_ckpt_iter5").exists()]
USUAL = ("gpt2", "tp2-pp2")
"""What every run of the tests tries: a tied model, whose two copies lie on different stages."""


def follow(
    pool: Pool, case: str, layout: str, folder: Path, records: list[dict[str, Any]], *more: object
) -> None:
    """Run on a layout, and compare each iteration with Megatron-core's."""
    world, sizes = LAYOUTS[layout]
    flags = json.loads((DATA / case / "case.json").read_text())["flags"]
    per_token = "--calculate-per-token-loss" in flags
    objective = "" if per_token else "--no-calculate-per-token-loss"
    words = shlex.split(
        f"{DATA / case} {flags} {objective} {sizes} --tokenizer-type NullTokenizer "
        "--vocab-size 127 --dataloader-type external --eval-iters 0 --num-workers 0 --device cpu "
        f"--log-interval 1 --metrics-file metrics.jsonl --train-iters {records[-1]['iteration']}"
    )
    program = "tests.end_to_end.trajectory_program"
    ended = launch(pool, world, program, *words, *more, folder=folder)
    assert [rank.code for rank in ended] == [0] * world, ended[0].err
    rows = metrics(folder / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == [record["iteration"] for record in records]
    for row, record in zip(rows, records, strict=True):
        assert row["lm_loss"] == pytest.approx(expected_loss(record, per_token), rel=1e-5)
        assert row["grad_norm"] == pytest.approx(record["grad_norm"], rel=1e-5)


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        pytest.param(case, layout, marks=() if (case, layout) == USUAL else pytest.mark.slow)
        for case in CONTINUED
        for layout in LAYOUTS
    ],
)
def test_torch_dist_with_its_optimizer_goes_on(
    pool: Pool, tmp_path: Path, case: str, layout: str
) -> None:
    record = json.loads((DATA / case / "case.json").read_text())
    load = ("--load", DATA / case / "dist_ckpt_iter5")
    follow(pool, case, layout, tmp_path, record["after_checkpoint"], *load)


@pytest.mark.parametrize(
    ("ranks", "stages", "layout"),
    [
        (2, 2, "dp2"),
        *(
            pytest.param(*files, layout, marks=pytest.mark.slow)
            for files, layout in itertools.product([(1, 1), (2, 2)], LAYOUTS)
            if (*files, layout) != (2, 2, "dp2")
        ),
    ],
)
def test_weights_in_the_older_format_train_as_there(
    pool: Pool, tmp_path: Path, ranks: int, stages: int, layout: str
) -> None:
    """From files of one layout, and of another than ours."""
    record = json.loads((DATA / "llama" / "case.json").read_text())
    with np.load(DATA / "llama" / "init.npz") as arrays:
        weights = {key: torch.from_numpy(arrays[key]) for key in arrays}
    save_legacy(
        tmp_path / "theirs" / "iter_0000010",
        weights,
        ranks,
        stages,
        layers=2,
        untie_embeddings_and_output_weights=True,
        swiglu=True,
    )
    load = ("--load", tmp_path / "theirs" / "iter_0000010", "--finetune")
    follow(pool, "llama", layout, tmp_path, record["iterations"], *load)
