"""What a run of several ranks does around the model: evaluations, logs, stops, loaders, indices.

Whole runs of pretrain_gpt.py on ranks of the worker pool, most compared with a run of one process.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.core.datasets.indexed import IndexedDatasetBuilder
from megatron.training import stopping
from tests.harness import Pool
from tests.programs import Ended, assert_rows_equal, launch, metrics

COMMON = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 16 "
    "--position-embedding-type rope --tokenizer-type NullTokenizer --vocab-size 60 "
    "--micro-batch-size 2 --global-batch-size 8 --lr 1e-2 --train-iters 3 --eval-iters 0 "
    "--attention-dropout 0 --hidden-dropout 0 --log-interval 1 --num-workers 0 --fp64 "
    "--device cpu --metrics-file metrics.jsonl"
)
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
CP2, PP4 = "--context-parallel-size 2", "--pipeline-model-parallel-size 4"
V, VPP = f"{PP2} --pipeline-schedule zb-v", f"{PP2} --num-virtual-stages-per-pipeline-rank 2"


def build_corpus(prefix: Path, documents: int, seed: int) -> str:
    """Write documents that count, of a few tokens to a few samples; return the prefix."""
    generator = np.random.default_rng(seed)
    with IndexedDatasetBuilder(str(prefix), np.uint16) as builder:
        for _ in range(documents):
            start, length = generator.integers(60), generator.integers(3, 40)
            builder.add_document([*((start + np.arange(length)) % 60).tolist(), 60])
        builder.finalize()
    return str(prefix)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """Return a corpus to train on and two to validate on, of 21 and 35 samples or so."""
    folder = tmp_path_factory.mktemp("corpora")
    sizes = {"train": 60, "one": 15, "two": 25}
    made = [build_corpus(folder / name, size, size) for name, size in sizes.items()]
    return made[0], made[1], made[2]


def run(pool: Pool, folder: Path, world: int, *words: object, module: str = "") -> list[Ended]:
    """Run in a new folder and return how the ranks ended: well."""
    folder.mkdir()
    common = (word for text in (COMMON, *words) for word in str(text).split())
    ended = launch(pool, world, module or "pretrain_gpt", *common, folder=folder)
    assert [one.code for one in ended] == [0] * world
    # The first rank prints.
    assert [one.out + one.err for one in ended[1:]] == [""] * (world - 1)
    return ended


def results(printed: str) -> list[str]:
    return re.findall(r"validation loss at .*", printed)


@pytest.mark.parametrize(
    ("flags", "layouts"),
    [
        ("--full-validation --eval-interval 2", [(4, CP2), (2, V)]),
        ("--eval-iters -1 --no-calculate-per-token-loss", [(4, f"{CP2} {PP2}"), (4, "")]),
        ("--eval-iters 3 --eval-interval 1", [(4, f"{TP2} {PP2}"), (4, PP4)]),
        ("--eval-iters 2 --skip-train", [(4, f"{CP2} {VPP}")]),
    ],
)
def test_validation_sets_are_evaluated_alike(
    pool: Pool,
    corpora: tuple[str, str, str],
    tmp_path: Path,
    flags: str,
    layouts: list[tuple[int, str]],
) -> None:
    """Over two sets, of which no number of replicas here divides the samples; masks are uneven."""
    train, *valid = corpora
    data = (
        f"--train-data-path {train} --valid-data-path {' '.join(valid)} "
        f"--multiple-validation-sets --eod-mask-loss --eval-iters 1 {flags}"
    )
    expected = results(run(pool, tmp_path / "serial", 1, data)[0].out)
    assert len({line.split("|")[0] for line in expected}) > 1  # a line for each set
    for number, (world, layout) in enumerate(layouts):
        folder = tmp_path / f"layout{number}"
        assert results(run(pool, folder, world, data, layout)[0].out) == expected
        if "skip" not in flags:
            ours, theirs = (metrics(at / "metrics.jsonl") for at in (folder, tmp_path / "serial"))
            assert_rows_equal(ours, theirs)


@pytest.mark.parametrize(
    ("flags", "layouts"),
    [
        ("--rampup-batch-size 4 4 8 --train-iters 4", [(4, f"{CP2} {PP2}"), (4, VPP)]),
        ("--iterations-to-skip 2", [(2, PP2), (2, V), (4, CP2)]),
        ("--global-batch-size 2", [(4, PP4), (4, f"{PP4} --pipeline-schedule zb-h1"), (2, V)]),
        ("--reset-position-ids --reset-attention-mask --eod-mask-loss", [(4, PP4), (4, CP2)]),
        # Masks follow from the number of the microbatch in the global batch.
        ("--hidden-dropout 0.1 --attention-dropout 0.1", [(2, ""), (4, VPP), (2, V)]),
        ("--log-params-norm --log-num-zeros-in-grad", [(4, f"{TP2} {CP2}"), (4, f"{TP2} {PP2}")]),
    ],
)
def test_training_goes_alike(
    pool: Pool,
    corpora: tuple[str, str, str],
    tmp_path: Path,
    flags: str,
    layouts: list[tuple[int, str]],
) -> None:
    data = f"--train-data-path {corpora[0]} {flags}"
    run(pool, tmp_path / "serial", 1, data)
    for number, (world, layout) in enumerate(layouts):
        folder = tmp_path / f"layout{number}"
        run(pool, folder, world, data, layout)
        ours, theirs = (metrics(at / "metrics.jsonl") for at in (folder, tmp_path / "serial"))
        assert_rows_equal(ours, theirs)


def test_one_rank_writes_what_a_run_leaves_behind(pool: Pool, tmp_path: Path) -> None:
    words = (
        "--mock-data --save save --tensorboard-dir board --log-progress --timing-log-level 2 "
        f"--timing-log-option all --log-timers-to-tensorboard {TP2} {PP2}"
    )
    printed = run(pool, tmp_path / "run", 4, words)[0].out
    events = list((tmp_path / "run" / "board").glob("events*"))
    assert len(events) == 1
    board = EventAccumulator(str(events[0])).Reload()
    assert [event.step for event in board.Scalars("lm loss")] == [1, 2, 3]
    progress = (tmp_path / "run" / "save" / "progress.txt").read_text().splitlines()
    assert [line.split("\t")[3] for line in progress] == ["Starting job", "Saved checkpoint"]
    assert all("# GPUs: 4" in line for line in progress)
    status = json.loads((tmp_path / "run" / "save" / "run_status.json").read_text())
    assert (status["reason"], status["iteration"]) == ("complete", 3)
    assert Path(status["checkpoint"]).name == "iter_0000003"
    # Every rank's time, once per iteration, of what every rank does.
    for name in ("forward-compute", "backward-compute", "optimizer"):
        block = re.findall(rf"  {name}:\n((?:     rank +\d: [\d.]+\n)+)", printed + "\n")
        assert [len(lines.splitlines()) for lines in block] == [4] * 3
    assert printed.count("number of parameters on (tensor, pipeline)") == 1


@pytest.mark.parametrize(
    ("act", "reason"), [("signal", "signal"), ("late", "duration"), ("file", "stop file")]
)
def test_what_one_rank_sees_stops_all_after_the_same_iteration(
    pool: Pool, tmp_path: Path, act: str, reason: str
) -> None:
    (tmp_path / "save").mkdir()
    words = (
        f"{COMMON} --mock-data --save save --exit-signal-handler --exit-duration-in-mins 60 "
        f"--exit-code-on-early-stop 7 {TP2} {PP2}"
    )
    more = ("3", act, *words.split())
    ended = launch(pool, 4, "tests.end_to_end.interrupted_program", *more, folder=tmp_path)
    assert [one.code for one in ended] == [7] * 4
    assert f"stopped after iteration 2: {reason}" in ended[0].out
    status = json.loads((tmp_path / "save" / "run_status.json").read_text())
    assert (status["reason"], status["iteration"]) == (reason, 2)
    assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert not (tmp_path / "save" / stopping.STOP_FILE).exists()
    assert [row["iteration"] for row in metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_sequences_of_a_program_s_own_may_differ_between_microbatches(
    pool: Pool, tmp_path: Path
) -> None:
    words = "--dataloader-type external --eval-iters 1 --eval-interval 2"
    module = "tests.end_to_end.external_program"
    run(pool, tmp_path / "serial", 1, words, module=module)
    for number, (world, layout) in enumerate(
        [(4, PP4), (4, f"{CP2} {PP2}"), (2, V), (4, f"{TP2} --sequence-parallel")]
    ):
        folder = tmp_path / f"layout{number}"
        run(pool, folder, world, words, layout, module=module)
        ours, theirs = (metrics(at / "metrics.jsonl") for at in (folder, tmp_path / "serial"))
        assert_rows_equal(ours, theirs)


def test_one_rank_builds_the_index_and_the_others_wait(
    pool: Pool, corpora: tuple[str, str, str], tmp_path: Path
) -> None:
    words = f"--train-data-path {corpora[0]} --data-cache-path cache {TP2}"
    (tmp_path / "cache").mkdir()
    printed = run(pool, tmp_path / "run", 4, words)[0].out
    assert "index: 0 files found, 1 built" in printed
