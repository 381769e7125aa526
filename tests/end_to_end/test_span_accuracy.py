"""tools/span_accuracy.py on a checkpoint of a run of bytes: what is measured, and what it says."""

import shutil
from pathlib import Path

import numpy as np
import pytest

import pretrain_t5
from megatron.core.datasets.indexed import IndexedDatasetBuilder
from megatron.core.utils import UserError
from tools import span_accuracy

RUN = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --encoder-seq-length 24 "
    "--decoder-seq-length 16 --position-embedding-type relative --tokenizer-type "
    "ByteLevelTokenizer --vocab-extra-ids 9 --span-corruption random_spans --micro-batch-size 2 "
    "--train-iters 2 --lr 1e-2 --device cpu --num-workers 0 --eval-iters 0 --save-interval 1"
)


def write(prefix: Path, letter: str) -> str:
    """Write documents of one letter."""
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for _ in range(60):
            builder.add_document([ord(letter)] * 20 + [256], [21])
        builder.finalize()
    return str(prefix)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of two corpora, and of a run with two checkpoints that read one of them."""
    folder = tmp_path_factory.mktemp("run")
    data = write(folder / "a", "a")
    write(folder / "b", "b")
    words = f"{RUN} --data-path {data} --split 50,50,0 --save {folder / 'save'}"
    assert pretrain_t5.main(words.split()) == 0
    return folder


def measured(run: Path, words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Return exit code, what was printed and what was said on stderr."""
    capsys.readouterr()
    common = f"--load {run / 'save'} --device cpu --samples 6 --batch-size 4"
    code = span_accuracy.main(f"{common} {words}".split())
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_model_behind_the_commonest_token_says_so(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A text of one letter: nothing can be ahead of it."""
    code, out, err = measured(run, "--ckpt-step 1", capsys)
    assert code == 1 and "of iteration 1 from" in out
    assert "the commonest one ('a') everywhere: 100.0%, by chance: 100.0%" in out
    assert "span_accuracy: not ahead of the commonest token, which is right" in err
    assert "iteration 2 from" in measured(run, "", capsys)[1]


def test_other_data_win_over_the_runs_own(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (f"--data-path {run / 'b'} --split 0,1,0", f"--valid-data-path {run / 'b'}"):
        assert "the commonest one ('b')" in measured(run, words, capsys)[1]
    moved = run / "moved"
    moved.mkdir()
    for path in run.glob("a.*"):
        shutil.move(path, moved / path.name)
    try:
        with pytest.raises(UserError, match="/a"):
            measured(run, "", capsys)
        assert "the commonest one ('a')" in measured(run, f"--data-path {moved / 'a'}", capsys)[1]
    finally:
        for path in moved.glob("a.*"):
            shutil.move(path, run / path.name)


def test_several_validation_sets_have_a_line_each(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"--valid-data-path {run / 'a'} {run / 'b'} --multiple-validation-sets"
    code, out, _ = measured(run, words, capsys)
    lines = [line for line in out.splitlines() if " validation samples: " in line]
    assert code == 1 and [line[:24] for line in lines] == [
        "a: 6 validation samples:",
        "b: 6 validation samples:",
    ]
    assert "('a')" in lines[0] and "('b')" in lines[1]


def test_a_short_set_is_read_once(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--valid-data-path {run / 'a'} --full-validation --samples 10000"
    out = measured(run, words, capsys)[1]
    (count,) = (int(line.split()[0]) for line in out.splitlines() if " validation samp" in line)
    assert 6 < count < 1000


def test_samples_without_a_masked_token_are_refused(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=r"no token of the 6 .* larger --mask-prob \(0.01\)"):
        measured(run, "--span-corruption ngrams --mask-prob 0.01", capsys)


def test_another_tokenizer_is_refused_by_name(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="trained with another tokenizer"):
        measured(run, "--vocab-extra-ids 8", capsys)
    with pytest.raises(UserError, match="holds no checkpoint"):
        span_accuracy.main(["--load", str(run / "nothing")])
    with pytest.raises(UserError, match="--load"):
        span_accuracy.main([])
