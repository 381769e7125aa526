"""pretrain_gpt.py goes on from checkpoints of Megatron-LM's, and writes them."""

import json
import shlex
from pathlib import Path

import pytest

import pretrain_gpt
from megatron.core.dist_checkpointing.reader import Checkpoint
from megatron.core.utils import UserError
from tests.harness import Pool
from tests.programs import ROOT, Rows, assert_rows_equal, launch, metrics
from tools import checkpoint, generate_text

CASES = ROOT / "tests" / "data" / "mcore_trajectories"
DATA = "--tokenizer-type NullTokenizer --vocab-size 127 --mock-data --eval-iters 0 --num-workers 0"
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --swiglu --normalization RMSNorm "
    "--group-query-attention --num-query-groups 2 --position-embedding-type rope --seq-length 16 "
    "--disable-bias-linear --untie-embeddings-and-output-weights --max-position-embeddings 16"
)


def continued(case: str, folder: Path, *more: str) -> list[str]:
    """Return the command line that goes on from a case's iteration 5, as a user would give it."""
    flags = json.loads((CASES / case / "case.json").read_text())["flags"]
    words = f"{flags} {DATA} --train-iters 7 --device cpu --log-interval 1"
    load = ["--load", str(CASES / case / "dist_ckpt_iter5"), "--fp64", *more]
    return [*shlex.split(words), *load, "--metrics-file", str(folder / "metrics.jsonl")]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("case", ["gpt2", "llama"])
def test_a_run_of_megatrons_goes_on_with_1_rank_and_with_4(
    case: str, pool: Pool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    objective = "--no-calculate-per-token-loss"
    assert pretrain_gpt.main(continued(case, tmp_path, objective)) == 0
    serial: Rows = metrics(tmp_path / "metrics.jsonl")
    assert [(row["iteration"], row["consumed_samples"]) for row in serial] == [(6, 24), (7, 28)]
    out = capfd.readouterr().out
    assert "at iteration 5, in the format torch_dist (Megatron)" in out
    assert "weights loaded, optimizer loaded" in out
    (tmp_path / "four").mkdir()
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2".split()
    words = continued(case, tmp_path / "four", objective, *layout)
    ended = launch(pool, 4, "pretrain_gpt", *words, folder=tmp_path / "four")
    assert [rank.code for rank in ended] == [0, 0, 0, 0], ended[0].err
    assert_rows_equal(metrics(tmp_path / "four" / "metrics.jsonl"), serial)


def own(folder: Path, *more: str) -> list[str]:
    words = f"{MODEL} {DATA} --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --device cpu"
    rest = ["--log-interval", "1", *more, "--metrics-file", str(folder / "metrics.jsonl")]
    return [*shlex.split(words), *rest]


@pytest.mark.parametrize("precision", ["", "--bf16"])
def test_a_run_goes_on_from_its_own_export_as_if_nothing_had_been(
    precision: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Weights, masters, moments, step, schedule, samples, all through Megatron's format."""
    kept = precision.split()
    save = ["--save", "save", "--save-interval", "2", "--train-iters", "4"]
    assert pretrain_gpt.main(own(tmp_path, *kept, *save)) == 0
    whole = metrics(tmp_path / "metrics.jsonl")
    convert = "--load save --ckpt-step 2 --ckpt-convert-format torch_dist --ckpt-convert-save out"
    assert pretrain_gpt.main(own(tmp_path, *kept, "--train-iters", "4", *convert.split())) == 0
    said = capfd.readouterr().out
    assert "converted save/iter_0000002 to out/torch_dist/iter_0000002" in said
    assert "torch_dist has no place for the generators of 1 rank(s)" in said
    (tmp_path / "metrics.jsonl").unlink()
    # Nothing of the model is said: arguments come from the export.
    words = f"{DATA} --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --device cpu"
    load = "--use-checkpoint-args --load out/torch_dist --train-iters 4 --log-interval 1"
    rest = [*kept, *load.split(), "--metrics-file", "metrics.jsonl"]
    assert pretrain_gpt.main([*shlex.split(words), *rest]) == 0
    assert_rows_equal(metrics(tmp_path / "metrics.jsonl"), whole[2:])
    words = "--num-tokens-to-generate 3 --top-k 1 --device cpu --ckpt-step 2 --load".split()
    texts = []
    for folder in ("save", "out/torch_dist"):
        capfd.readouterr()
        assert generate_text.main([*words, folder, "--prompt", "1 2 3"]) == 0
        texts.append([line for line in capfd.readouterr().out.splitlines() if line[:5] == "1 2 3"])
    assert texts[0] == texts[1] and len(texts[0]) == 1
    with Checkpoint(tmp_path / "out" / "torch_dist" / "iter_0000002") as checkpoint:
        assert checkpoint.facts["progress"]["consumed_samples"] == 8
        assert any(key.startswith("optimizer.master.") for key in checkpoint.tensors) == bool(kept)


def test_a_checkpoint_of_megatrons_keeps_its_objective(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save = ["--save", "save", "--train-iters", "1", "--no-calculate-per-token-loss"]
    assert pretrain_gpt.main(own(tmp_path, *save)) == 0
    convert = "--load save --ckpt-convert-format torch_dist --ckpt-convert-save out".split()
    assert pretrain_gpt.main(own(tmp_path, "--train-iters", "1", *convert)) == 0
    capfd.readouterr()
    load = ["--load", "out/torch_dist", "--train-iters", "1"]
    assert pretrain_gpt.main(own(tmp_path, *load)) == 0
    out = capfd.readouterr().out
    assert "averaged as in the checkpoint of Megatron-LM's: --no-calculate-per-token-loss" in out
    assert "objective was" not in out
    # A flag is a wish, and the difference is told.
    assert pretrain_gpt.main(own(tmp_path, *load, "--calculate-per-token-loss")) == 0
    assert "objective was microbatches in the checkpoint and is tokens" in capfd.readouterr().out


def test_the_tool_converts_both_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = CASES / "llama" / "dist_ckpt_iter5"
    words = ["convert", "--load", str(source), "--save"]
    with pytest.raises(UserError, match="does not say how many are true; give --vocab-size"):
        checkpoint.main([*words, "ours"])
    assert checkpoint.main([*words, "ours", "--vocab-size", "128"]) == 0
    back = ["convert", "--load", "ours", "--save", "theirs", "--to", "torch_dist"]
    assert checkpoint.main(back) == 0
    assert "as torch_dist" in capsys.readouterr().out
    with pytest.raises(UserError, match="exists already"):
        checkpoint.main(back)
    for folder in ("ours", "theirs"):
        assert checkpoint.main(["verify", folder]) == 0
    assert checkpoint.main(["diff", "theirs", str(source), "--only", "model."]) == 0
    assert checkpoint.main(["diff", "theirs", str(source), "--only", "optimizer."]) == 0
    assert checkpoint.main(["diff", "ours", "theirs"]) == 0
    with Checkpoint(tmp_path / "theirs" / "iter_0000005") as exported:
        assert exported.facts["vocabulary_rows"] == 128
        assert exported.facts["schedule"]["decay"] == 1000
