"""What runs tell of the loads of their experts is the same on every layout."""

from pathlib import Path

import pytest

from tests.distributed.test_moe_layouts import A2A, BASE, CP, EP, ETP, ITERATIONS, PP, TP
from tests.harness import Pool
from tests.programs import Rows, assert_rows_equal, launch, metrics

WORDS = (
    f"{BASE} --moe-router-topk 2 --moe-aux-loss-coeff 0.3 --moe-z-loss-coeff 0.05 "
    "--moe-layer-freq [0]+[1]*3 --moe-expert-capacity-factor 0.75 --eval-interval 1 "
    "--eval-iters 1 --log-interval 1 --num-workers 0 --metrics-file metrics.jsonl"
)
LAYOUTS = [
    (2, f"{EP} 2 {A2A}"),
    (2, f"{PP} 2"),
    (2, f"{TP} 2 {ETP} 1 {EP} 2"),
    (4, f"{TP} 2 --sequence-parallel {CP} 2 {A2A}"),
    (4, f"{PP} 2 --num-virtual-stages-per-pipeline-rank 2 {EP} 2 {A2A} --use-megatron-fsdp"),
]


def rows_of(pool: Pool, folder: Path, world: int, layout: str) -> Rows:
    folder.mkdir()
    ended = launch(pool, world, "pretrain_gpt", *f"{WORDS} {layout}".split(), folder=folder)
    assert [one.code for one in ended] == [0] * world, ended[0].err
    assert ended[0].out.count("| expert imbalance: ") == ITERATIONS
    return metrics(folder / "metrics.jsonl")


@pytest.fixture(scope="module")
def serial(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    return rows_of(pool, tmp_path_factory.mktemp("loads") / "serial", 1, "")


def test_evaluations_are_not_counted(serial: Rows) -> None:
    trained = [row for row in serial if row.get("split") is None]
    assert len(trained) == ITERATIONS and len(serial) > ITERATIONS
    for row in trained:
        assert [layer["layer"] for layer in row["experts"]] == [1, 2, 3]
        assert all(sum(layer["tokens"]) == 8 * 16 * 2 for layer in row["experts"])
        assert all(layer["dropped"] > 0 for layer in row["experts"])
        for loss in ("load_balancing_loss", "z_loss"):
            mean = sum(layer[loss] for layer in row["experts"]) / 3
            assert row[loss] == pytest.approx(mean, rel=1e-10)


def test_the_fullest_rank_is_told(pool: Pool, tmp_path: Path, serial: Rows) -> None:
    """Of all experts on one half of them: twice what is even, at most."""
    layout = f"{EP} 2 {A2A} --log-moe-overload-factor"
    rows = rows_of(pool, tmp_path / "parts", 2, layout)
    for row, alone in zip(rows, serial, strict=True):
        if row.get("split") is not None:
            continue
        for layer, same in zip(row["experts"], alone["experts"], strict=True):
            halves = sum(same["tokens"][: len(same["tokens"]) // 2]), sum(same["tokens"])
            fullest = max(halves[0], halves[1] - halves[0])
            assert layer["overload"] == pytest.approx(2 * fullest / halves[1])


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        pytest.param(*layout, marks=() if number < 2 else pytest.mark.slow)
        for number, layout in enumerate(LAYOUTS)
    ],
)
def test_par_20_rows_are_the_same(
    pool: Pool, serial: Rows, tmp_path: Path, world: int, layout: str
) -> None:
    assert_rows_equal(rows_of(pool, tmp_path / "parts", world, layout), serial)
