"""Whole runs learn, whatever the data and the precision."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pretrain_gpt
from megatron.core.datasets.indexed import IndexedDataset, IndexedDatasetBuilder
from megatron.core.kernels import matmul
from megatron.core.rng import DropoutKey
from megatron.training.objective import TokenLosses
from tests.end_to_end.training.runs import (
    VOCABULARY,
    rows,
)
from tools import preprocess_data


def test_a_run_learns(run: Callable[..., int], capfd: pytest.CaptureFixture[str]) -> None:
    assert run("--train-iters", 60, "--lr-decay-style", "constant") == 0
    losses = [row["lm_loss"] for row in rows()]
    assert losses[0] == pytest.approx(np.log(128), rel=0.05) or losses[0] < np.log(128)
    assert np.mean(losses[-5:]) < 0.6 * losses[0]
    out = capfd.readouterr().out
    line = re.compile(
        r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\] iteration       60/      60 \| "
        r"consumed samples:          240 \| elapsed time per iteration \(ms\): \d+\.\d \| "
        r"learning rate: 1\.000000E-02 \| global batch size:     4 \| lm loss: (\S+) \| "
        r"loss scale: 1\.0 \| grad norm: \d+\.\d{3} \| number of skipped iterations:   0 \| "
        r"number of nan iterations:   0 \|"
    )
    found = line.search(out)
    assert found and float(found[1]) == pytest.approx(losses[-1], rel=1e-6)
    assert "time to the first iteration (s) | imports:" in out


def test_ds_08_documents_of_one_sentence_train_without_a_pair_objective(
    run: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    texts = [f"This is sentence number {number}." for number in range(10)]
    Path("c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = ("--tokenizer-type", "ByteLevelTokenizer")
    words = ("--input", "c.jsonl", "--output-prefix", "c", "--split-sentences", "--append-eod")
    assert preprocess_data.main([*words, *tokenizer, "--workers", "1"]) == 0
    assert len(IndexedDataset("c_text_sentence")) == len(texts)
    data = ("--data-path", "c_text_sentence", "--split", "80,10,10", "--vocab-size", 300)
    assert run(*data, *tokenizer, "--train-iters", 8, "--eval-iters", 1) == 0
    losses = [row["lm_loss"] for row in rows() if "split" not in row]
    assert len(losses) == 8 and losses[-1] < losses[0]


def test_positions_that_only_count_up_are_left_to_the_model(
    run: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[set[str]] = []
    original = pretrain_gpt.forward_step

    def recording(model: Any, batch: Any, x: Any, dropout: DropoutKey | None) -> TokenLosses:
        names.append(set(batch))
        return original(model, batch, x, dropout)

    monkeypatch.setattr(pretrain_gpt, "forward_step", recording)
    common = ("--train-iters", 1, "--eval-iters", 1)
    for flags, more in (
        ((), set()),
        (("--reset-attention-mask",), {"cu_seqlens"}),
        (("--reset-position-ids",), {"position_ids"}),
    ):
        names.clear()
        assert run(*common, *flags) == 0
        # Two microbatches of training, of validation and of testing.
        assert names == [{"tokens", "labels", "loss_mask"} | more] * 6


def test_a_whole_validation_set_does_not_depend_on_the_batch(run: Callable[..., int]) -> None:
    common = ("--train-iters", 1, "--eval-iters", -1, "--fp64", "--hidden-dropout", 0)
    common += ("--attention-dropout", 0)
    for micro in (1, 2, 4):
        assert run(*common, "--micro-batch-size", micro) == 0
    found = [row["lm_loss"] for row in rows() if row.get("split") == "valid"]
    assert len(found) == 3
    assert found == pytest.approx([found[0]] * 3, rel=1e-12)
    tests = [row["lm_loss"] for row in rows() if row.get("split") == "test"]
    assert tests == pytest.approx([tests[0]] * 3, rel=1e-12) and tests[0] != found[0]


def test_documents_that_do_not_see_each_other(run: Callable[..., int]) -> None:
    packed = ("--reset-attention-mask", "--reset-position-ids", "--eod-mask-loss")
    assert run("--train-iters", 2, *packed) == 0
    assert run("--train-iters", 2) == 0
    first, _, plain, _ = [row["lm_loss"] for row in rows()]
    assert np.isfinite(first) and first != plain


def test_workers_read_the_same_samples(run: Callable[..., int]) -> None:
    assert run("--train-iters", 3) == 0
    assert run("--train-iters", 3, "--num-workers", 1) == 0
    losses = [row["lm_loss"] for row in rows()]
    assert losses[:3] == losses[3:]


HALVES = {
    "bf16": (("--bf16",), 0.01),
    "fp16": (("--fp16", "--initial-loss-scale", 2**16), 0.002),
}


def test_half_precision_learns_what_fp32_does(
    run: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The short form of benchmarks/precision.py: means of ten iterations stay within bounds."""
    monkeypatch.setattr(matmul, "cpu_features", frozenset)  # products by way of fp32
    curves = {}
    flags = ("--train-iters", 40, "--log-interval", 40, "--hidden-dropout", 0)
    flags += ("--attention-dropout", 0)
    for name, (words, _) in {"fp32": ((), 0.0), **HALVES}.items():
        assert run(*flags, *words, "--metrics-file", f"{name}.jsonl") == 0
        losses = [row["lm_loss"] for row in rows(f"{name}.jsonl")]
        curves[name] = np.array(losses).reshape(4, 10).mean(1)
    assert curves["fp32"][-1] < 0.9 * curves["fp32"][0]
    for name, (_, bound) in HALVES.items():
        assert curves[name] == pytest.approx(curves["fp32"], rel=bound)


def test_a_cyclic_order_and_a_length_in_samples(run: Callable[..., int]) -> None:
    flags = ("--dataloader-type", "cyclic", "--train-samples", 20, "--lr-warmup-samples", 8)
    assert run(*flags) == 0
    assert [row["consumed_samples"] for row in rows()] == [4, 8, 12, 16, 20]
    rates = [row["learning_rate"] for row in rows()]
    assert rates[:3] == pytest.approx([0.0, 0.005, 0.01])


def test_a_corpus_of_which_no_token_counts_is_warned_of(
    run: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    builder = IndexedDatasetBuilder(str(tmp_path / "ends"), np.uint16)
    for _ in range(300):
        builder.add_document([VOCABULARY] * 5, [5])
    builder.finalize()
    words = ("--data-path", tmp_path / "ends", "--eod-mask-loss", "--train-iters", 4)
    assert run(*words, "--log-interval", 2) == 0
    out = capfd.readouterr().out
    assert re.findall(r"warning: no token of iteration (\d+) counts", out) == ["1", "3"]
    assert "lm loss" not in out and out.count("number of skipped iterations:   2 |") == 2
    assert [row["lm_loss"] for row in rows()] == [None] * 4
