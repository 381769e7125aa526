"""A dry run refuses what the run refuses, in its words, and says what it cannot know."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import pretrain_bert
import pretrain_t5
from megatron.core.datasets.indexed import IndexedDatasetBuilder
from megatron.core.utils import UserError
from tests.unit import tokenizer_files as files

COMMON = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --micro-batch-size 1 "
    "--train-iters 1 --lr 1e-3 --eval-iters 0 --mock-data --device cpu "
)
BYTES = "--tokenizer-type ByteLevelTokenizer "
T5 = COMMON + BYTES + "--encoder-seq-length 32 --decoder-seq-length 16 "
RANDOM = T5 + "--span-corruption random_spans "
"""Texts of 34 tokens: 5 of noise in 2 spans, whose targets are of 8 tokens."""
BERT = COMMON + "--seq-length 32 "
SMALL_BPE = (
    "--tokenizer-type GPT2BPETokenizer --vocab-file {}/vocab.json --merge-file {}/merges.txt"
)


def refused(program: ModuleType, words: str) -> str:
    with pytest.raises(UserError) as error:
        program.main(words.split())
    return str(error.value)


@pytest.mark.parametrize(
    ("program", "words", "said"),
    [
        (pretrain_t5, f"{RANDOM} --vocab-extra-ids 100 --decoder-seq-length 7", "at least that"),
        (pretrain_t5, f"{RANDOM} --vocab-extra-ids 1", "has 1 sentinel tokens, but"),
        (pretrain_t5, RANDOM, "--vocab-extra-ids 100 adds them"),
        (pretrain_t5, T5, "--vocab-extra-ids 100 adds them"),
        (pretrain_t5, f"{T5} --tokenizer-type NullTokenizer --vocab-size 99", "needs sentinel"),
        (
            pretrain_t5,
            f"{T5} --vocab-extra-ids 9 --tokenizer-special-tokens <eod>",
            "tools/train_tokenizer.py --special-tokens '<pad>' '<s>'",
        ),
        (
            pretrain_t5,
            f"{T5} --vocab-extra-ids 9 --dataloader-type external",
            "pretrain_t5.py brings no loaders of its own",
        ),
        (
            pretrain_bert,
            f"{BERT} {BYTES} --dataloader-type external",
            "pretrain_bert.py brings no loaders of its own",
        ),
        (
            pretrain_bert,
            f"{BERT} {SMALL_BPE} --data-path corpus".replace("--mock-data", ""),
            "tools/train_tokenizer.py --special-tokens '[CLS]' '[SEP]' '[MASK]'",
        ),
    ],
)
def test_a_dry_run_refuses_what_the_run_refuses(
    program: ModuleType,
    words: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    files.write_gpt2(tmp_path, files.train_merges(20))
    words = words.replace("{}", str(tmp_path))
    message = refused(program, words)
    assert said in message
    assert refused(program, f"{words} --dry-run") == message


def data_lines(words: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert pretrain_t5.main([*words.split(), "--dry-run"]) == 0
    section = capsys.readouterr().out.split("\ndata:\n")[1].split("\n\n")[0]
    return [" ".join(line.split()) for line in section.splitlines()]


def test_a_plan_says_that_fewer_spans_are_masked(capsys: pytest.CaptureFixture[str]) -> None:
    """N-grams make do with what there is, and the run says so."""
    lines = data_lines(f"{T5} --vocab-extra-ids 1 --mask-prob 0.4", capsys)
    assert any("has 1 sentinel tokens: fewer are masked" in line for line in lines)


def test_a_plan_without_the_tokenizers_files_says_what_is_not_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = T5.replace(BYTES, "--vocab-file nowhere.txt ")
    lines = data_lines(words, capsys)
    assert any("not known is whether the tokenizer has sentinels" in line for line in lines)
    # How many were asked for is known without them.
    few = refused(
        pretrain_t5, f"{words} --span-corruption random_spans --vocab-extra-ids 1 --dry-run"
    )
    assert "has 1 sentinel tokens, but" in few


@pytest.mark.parametrize("kind", ["ngrams", "random_spans"])
def test_a_plan_says_that_a_split_is_empty(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with IndexedDatasetBuilder("corpus", np.uint16) as builder:
        for _ in range(20):
            builder.add_document([1] * 40)
        builder.finalize()
    words = T5.replace("--mock-data", "--data-path corpus --split 999,1,0")
    words = words.replace("--eval-iters 0", "--eval-iters 1")
    words += f" --vocab-extra-ids 9 --span-corruption {kind}"
    message = refused(pretrain_t5, words)
    assert message.startswith(
        "the valid split of corpus is empty: --split 999,1,0 gives it 0 of 20"
    )
    plan = data_lines(words, capsys)
    (line,) = [line for line in plan if "a run is refused" in line]
    assert line.replace("documents", "sequences") == (
        f"a run is refused: {message}".replace("documents", "sequences")
    )
    enough = data_lines(words.replace("999,1,0", "90,10,0"), capsys)
    assert not any("refused" in line for line in enough)
