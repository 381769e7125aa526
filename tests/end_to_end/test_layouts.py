"""pretrain_gpt.py on the corpus of the quickstart, on several layouts: one process's metrics file.

The largest are started by torchrun, as users do, which costs a start of the interpreter for each of
eight processes; the others are whole runs of the program too, on ranks of the worker pool.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import pretrain_gpt
from tests.harness import Pool
from tests.programs import ROOT, Rows, assert_rows_equal, free_port, launch, metrics
from tools import preprocess_data

TOKENIZER = (
    f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {ROOT / 'data' / 'tokenizer.json'}"
)
MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --swiglu "
    "--position-embedding-type rope --normalization RMSNorm --disable-bias-linear --qk-layernorm "
    "--init-method-std 0.05 --attention-dropout 0 --hidden-dropout 0"
)
RUN = (
    "--make-vocab-size-divisible-by 64 --split 90,10,0 --micro-batch-size 1 --global-batch-size 8 "
    "--train-iters 3 --lr 5e-3 --eval-interval 2 --eval-iters 2 --log-interval 1 --num-workers 0 "
    "--fp64 --device cpu"
)
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the prefix of the shipped corpus, prepared as the quickstart does."""
    prefix = tmp_path_factory.mktemp("layouts") / "shakespeare"
    words = f"--input {ROOT / 'data' / 'shakespeare.jsonl'} {TOKENIZER} --append-eod --workers 1"
    assert preprocess_data.main([*words.split(), "--output-prefix", str(prefix)]) == 0
    return f"{prefix}_text_document"


def flags(corpus: str, folder: Path) -> list[str]:
    words = f"{MODEL} {TOKENIZER} {RUN} --data-path {corpus}"
    return [*words.split(), "--metrics-file", str(folder / "metrics.jsonl")]


@pytest.fixture(scope="module")
def serial(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """Return the rows of one process: three iterations, evaluated after two and at the end."""
    folder = tmp_path_factory.mktemp("serial")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE"):
            patch.delenv(name, raising=False)
        assert pretrain_gpt.main(flags(corpus, folder)) == 0
    found = metrics(folder / "metrics.jsonl")
    assert [row.get("split") for row in found] == [None, None, "valid", None, "valid"]
    assert found[0]["lm_loss"] > found[3]["lm_loss"] and found[0]["grad_norm"] > 0
    return found


@pytest.mark.parametrize(
    "layout",
    [
        "--pipeline-model-parallel-size 2 --overlap-grad-reduce --ddp-bucket-size 5000",
        pytest.param(
            "--context-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["tp2 pp2 dp2", "tp2 cp2 pp2"],
)
def test_eight_processes_of_torchrun(
    corpus: str, serial: Rows, tmp_path: Path, layout: str
) -> None:
    launcher = f"-m torch.distributed.run --nproc-per-node 8 --master-port {free_port()}"
    words = [*launcher.split(), str(ROOT / "pretrain_gpt.py"), *flags(corpus, tmp_path)]
    ended = subprocess.run(
        [sys.executable, *words, *TP2.split(), *layout.split()],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert_rows_equal(metrics(tmp_path / "metrics.jsonl"), serial)
    # One rank prints.
    assert ended.stdout.count("iteration        3/       3 |") == 1


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (8, f"{TP2} {PP2} --context-parallel-size 2 --sequence-parallel"),
        (4, f"{TP2} --sequence-parallel --overlap-grad-reduce"),
        (4, f"{PP2} --num-virtual-stages-per-pipeline-rank 2 --overlap-grad-reduce"),
        (4, f"{TP2} {PP2} --pipeline-schedule zb-v --sequence-parallel"),
        (4, "--context-parallel-size 2 --cp-comm-type a2a --use-tp-pp-dp-mapping"),
    ],
    ids=["tp2 cp2 pp2", "tp2 dp2", "pp2 vpp2 dp2", "tp2 pp2 v", "cp2 dp2"],
)
def test_other_layouts(
    pool: Pool,
    corpus: str,
    serial: Rows,
    tmp_path: Path,
    world: int,
    layout: str,
) -> None:
    words = (*flags(corpus, tmp_path), *layout.split())
    ended = launch(pool, world, "pretrain_gpt", *words, folder=tmp_path)
    assert [one.code for one in ended] == [0] * world
    assert not any(one.out for one in ended[1:])
    assert_rows_equal(metrics(tmp_path / "metrics.jsonl"), serial)
