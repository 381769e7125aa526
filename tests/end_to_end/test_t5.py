"""Runs of pretrain_t5.py: resumes, other layouts, fp16, what its checkpoints are refused for."""

import re
from pathlib import Path

import pytest

from megatron.core.utils import UserError
from tests.harness import Pool
from tests.programs import Ended, assert_rows_equal, launch, metrics
from tools import checkpoint

COMMON = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --kv-channels 6 "
    "--encoder-seq-length 24 --decoder-seq-length 12 --max-position-embeddings 24 "
    "--position-embedding-type relative --relative-attention-num-buckets 8 "
    "--relative-attention-max-distance 16 --micro-batch-size 2 --global-batch-size 4 --lr 1e-2 "
    "--lr-decay-style constant --train-iters 6 --eval-iters 1 --eval-interval 3 --log-interval 1 "
    "--mock-data --vocab-file vocab.txt --vocab-extra-ids 12 --num-workers 0 --device cpu "
    "--attention-dropout 0 --hidden-dropout 0 --metrics-file metrics.jsonl"
)
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def run(pool: Pool, folder: Path, world: int, words: str) -> list[Ended]:
    """Run in a folder; all ranks end well."""
    folder.mkdir(exist_ok=True)
    vocabulary = [*SPECIAL, *(f"w{i}" for i in range(60))]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    ended = launch(pool, world, "pretrain_t5", *f"{COMMON} {words}".split(), folder=folder)
    assert [one.code for one in ended] == [0] * world
    return ended


@pytest.fixture(scope="module")
def straight(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of one process that was never stopped, with a checkpoint of it."""
    folder = tmp_path_factory.mktemp("straight")
    run(pool, folder, 1, "--fp64 --save saved --save-interval 3")
    return folder


@pytest.mark.parametrize(
    ("world", "words"),
    [
        (1, ""),
        (2, "--pipeline-model-parallel-size 2 --pipeline-model-parallel-split-rank 1"),
        (4, "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2"),
    ],
)
def test_a_run_goes_on_where_another_stopped(
    pool: Pool, straight: Path, tmp_path: Path, world: int, words: str
) -> None:
    """On the same layout bit for bit, on another to 1e-10."""
    words = f"{words} --fp64 --load {straight / 'saved'} --ckpt-step 3"
    run(pool, tmp_path / "further", world, words)
    expected = [row for row in metrics(straight / "metrics.jsonl") if row["iteration"] > 3]
    found = [row for row in metrics(tmp_path / "further" / "metrics.jsonl") if row["iteration"] > 3]
    names = ("iteration", "lm_loss", "grad_norm", "validation_loss", "kind")
    kept = [[{n: row[n] for n in names if n in row} for row in rows] for rows in (found, expected)]
    assert any("grad_norm" in row for row in kept[0])
    if world == 1:
        assert kept[0] == kept[1]
    assert_rows_equal(*kept)


def test_half_precision_finds_its_loss_scale(pool: Pool, tmp_path: Path) -> None:
    words = "--fp16 --initial-loss-scale 8388608 --hysteresis 1 --tensor-model-parallel-size 2"
    run(pool, tmp_path, 2, words)
    rows = [row for row in metrics(tmp_path / "metrics.jsonl") if "grad_norm" in row]
    scales = [row["loss_scale"] for row in rows]
    assert len(rows) == 6 and scales == sorted(scales, reverse=True)
    assert scales[-1] < 2**23, "too large a scale is found to be so, and halved"
    assert rows[-1]["grad_norm"] is not None


@pytest.mark.parametrize("program", ["pretrain_gpt", "pretrain_bert"])
def test_another_program_says_whose_checkpoint_it_is(
    pool: Pool, straight: Path, tmp_path: Path, program: str
) -> None:
    (tmp_path / "vocab.txt").write_text((straight / "vocab.txt").read_text())
    words = COMMON.replace("--encoder-seq-length 24 --decoder-seq-length 12", "--seq-length 24")
    words = words.replace("--position-embedding-type relative", "").replace("--relative-", "--old-")
    words = re.sub(r"--old-attention-\S+ \d+", "", words) + f" --load {straight / 'saved'} --fp64"
    words += " --tokenizer-type BertWordPieceLowerCase"
    with pytest.raises(Exception, match=f"is of pretrain_t5.py, .* this run is of {program}.py"):
        launch(pool, 1, program, *words.split(), folder=tmp_path)


def test_no_export_is_made_yet(pool: Pool, straight: Path, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text((straight / "vocab.txt").read_text())
    words = (
        f"--fp64 --load {straight / 'saved'} --ckpt-convert-format torch_dist "
        f"--ckpt-convert-save {tmp_path}"
    )
    with pytest.raises(
        Exception, match="an encoder-decoder .*names there are not known yet; .*--to megatron"
    ):
        launch(pool, 1, "pretrain_t5", *f"{COMMON} {words}".split(), folder=tmp_path)
    words = f"convert --load {straight / 'saved'} --to torch_dist --save {tmp_path / 'out'}"
    with pytest.raises(
        UserError, match=r"--to torch_dist: .*not known yet; .*--to megatron .*--to hf"
    ):
        checkpoint.main(words.split())
    assert not (tmp_path / "out").exists()
    assert checkpoint.main(words.replace("torch_dist", "megatron").split()) == 0
