"""tools/inspect_dataset.py --iteration finds what a training run read, to the token."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pretrain_gpt
from megatron.core.datasets.indexed import IndexedDataset, IndexedDatasetBuilder
from megatron.core.utils import UserError
from megatron.training import data_trace
from megatron.training.arguments import parse
from megatron.training.objective import TokenLosses
from tools import inspect_dataset

EOD = 256
LENGTH = 16
SPECIAL = ("<eod>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>")
FIM = f"--tokenizer-special-tokens {' '.join(SPECIAL)} --fim-eod-token <eod>"


def write(prefix: Path, name: str, count: int, seed: int) -> None:
    """Write a corpus of documents of one or two sequences; its letters tell what is what."""
    generator = np.random.default_rng(seed)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for number in range(count):
            text = f"{name}{number}:" + "abcdefghij"[: generator.integers(0, 10)]
            tokens = [*text.encode(), EOD]
            cut = len(tokens) // 2
            lengths = [cut, len(tokens) - cut] if number % 3 == 0 else [len(tokens)]
            builder.add_document(tokens, lengths)
        builder.finalize()


class Recorder:
    """A forward step that notes the tokens of every microbatch it trains on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: list[list[list[int]]] = []
        self._original = pretrain_gpt.forward_step
        monkeypatch.setattr(pretrain_gpt, "forward_step", self)

    def __call__(self, model: Any, batch: Any, x: Any, dropout: Any) -> TokenLosses:
        if model.training:
            text = np.concatenate([batch["tokens"], batch["labels"][:, -1:]], axis=1)
            self.read.append(text.tolist())
        return self._original(model, batch, x, dropout)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Return what trains with a dump of its config, and returns its command line."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a", "a", 40, 1)
    write(tmp_path / "b", "b", 30, 2)

    def train(*more: object) -> list[str]:
        words = (
            "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 16 --lr 1e-2 "
            "--micro-batch-size 2 --global-batch-size 6 --train-iters 6 --num-workers 0 "
            "--tokenizer-type ByteLevelTokenizer "
            "--device cpu --eval-iters 0 --metrics-file metrics.jsonl --data-cache-path cache"
        )
        line = [*words.split(), *map(str, more)]
        assert pretrain_gpt.main([*line, "--dump-config", "run.json"]) == 0
        return line

    return train


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("metrics.jsonl").read_text().splitlines()]


def inspected(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert inspect_dataset.main([str(word) for word in words]) == 0
    return capsys.readouterr().out


def shown(ids: list[int]) -> str:
    return "".join(SPECIAL[i - EOD] if i >= EOD else chr(i) for i in ids)


BLEND = "--data-path 0.7 a 0.3 b --split 80,20,0"


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        (f"{BLEND} --rampup-batch-size 2 2 12", {2, 4, 6}),
        (f"{BLEND} --dataloader-type cyclic", {6}),
        ("--train-data-path a b --mid-level-dataset-surplus 0", {6}),
        ("--data-path b --split 1,0,0 --iterations-to-skip 2", {6}),
        (f"{BLEND} --fim-data --fim-rate 0.8 {FIM}", {6}),
    ],
    ids=["ramp", "cyclic", "blend by size", "one corpus, skipping", "fill in the middle"],
)
def test_an_iteration_is_what_the_run_read(
    flags: str,
    sizes: set[int],
    run: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recorder = Recorder(monkeypatch)
    run(*flags.split())
    read = iter([sample for microbatch in recorder.read for sample in microbatch])
    for row in rows():
        out = inspected(capsys, "--iteration", row["iteration"], "--config", "run.json")
        first, last = row["first_sample"], row["last_sample"]
        skipped = ", left out by --iterations-to-skip" if row["skipped"] else ""
        head, *samples = re.split(r"^=== ", out, flags=re.MULTILINE)
        assert head == f"iteration {row['iteration']}: samples {first} to {last}{skipped}\n"
        assert len(samples) == last - first + 1 in sizes
        for number, text in enumerate(samples):
            place = f"iteration {row['iteration']}, microbatch {number // 2}"
            assert text.startswith(f"sample {first + number} ({place})\n")
            if not row["skipped"]:
                assert text_of(text) == shown(next(read))
            check_pieces(text)
    assert next(read, None) is None
    assert {row["global_batch_size"] for row in rows()} == sizes


def text_of(sample: str) -> str:
    """Return the text of a printed sample, without the lines that tell where it is from."""
    return "".join(line for line in sample.splitlines()[2:] if not line.startswith("--- "))


def check_pieces(sample: str) -> None:
    """Compare what is said of each document with the corpus itself."""
    lines = sample.splitlines()
    said = re.fullmatch(
        r"    sample \d+ of (\w+): 17 tokens in (\d+) pieces?, loss at 16", lines[1]
    )
    assert said
    places = [
        tuple(map(int, re.findall(r"\d+", line.split("document ")[1])))
        for line in lines
        if line.startswith(f"--- {said[1]} document ")
    ]
    data = IndexedDataset(said[1])
    total = 0
    for line, (document, first, last, length) in zip(lines[2:][1::2], places, strict=False):
        start, end = data.document_indices[document : document + 2].tolist()
        tokens = [i for row in range(start, end) for i in data.get(row).tolist()]
        assert len(tokens) == length
        if "--- as the model reads it" not in lines:
            assert line == shown(tokens[first : last + 1])
        total += last + 1 - first
    if "--- as the model reads it" not in lines:
        assert total == LENGTH + 1
        assert len(places) == int(said[2])


def test_a_sample_of_a_checkpoint_and_of_moved_files(
    run: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    run(*BLEND.split(), "--save", "save", "--save-interval", 3)
    whole = inspected(capsys, "--iteration", 4, "--config", "run.json")
    assert inspected(capsys, "--load", "save", "--iteration", 4) == whole
    assert inspected(capsys, "--load", "save", "--ckpt-step", 3, "--iteration=4") == whole
    one = inspected(capsys, "--sample", 20, "--config", "run.json")
    assert one in whole and one.startswith("=== sample 20 (iteration 4, microbatch 1)")
    for name in ("a", "b"):
        for suffix in (".bin", ".idx"):
            Path(f"{name}{suffix}").rename(f"moved_{name}{suffix}")
    moved = inspected(
        *(capsys, "--iteration", 4, "--config", "run.json"),
        *("--data-path", 0.7, "moved_a", 0.3, "moved_b", "--data-cache-path", "other"),
    )
    assert moved.replace("moved_", "") == whole
    short = inspected(
        *(capsys, "--sample", 20, "--config", "run.json", "--max-tokens", 2),
        *("--data-path", 0.7, "moved_a", 0.3, "moved_b"),
    )
    assert "tokens more; --max-tokens shows them" in short


def test_what_a_user_can_get_wrong(
    run: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    run(*BLEND.split())
    for words, message in (
        ("--iteration 7 --config run.json", "--iteration 7: the run has iterations 1 to 6"),
        ("--iteration 0 --config run.json", "--iteration 0: the run has iterations 1 to 6"),
        ("--sample 36 --config run.json", "--sample 36: the run reads samples 0 to 35"),
        ("--sample 3 -1 --config run.json", "--sample -1: the run reads samples 0 to 35"),
        ("--iteration 1", "which run. Give --config FILE"),
        ("--iteration 1 --load nowhere", r"--load \(nowhere\) holds no checkpoint"),
        ("a --iteration 1 --config run.json", "before any flag|give no PREFIX"),
        ("--iteration 1 --config run.json --dataloader-type external", "loader decides"),
        ("--verify", "name what to look at"),
    ):
        with pytest.raises(UserError, match=message):
            inspect_dataset.main(words.split())
        assert "===" not in capsys.readouterr().out


def test_places_on_several_replicas() -> None:
    """Position 13 of batches of 12 = 3 replicas x micro-batch 2 x 2 microbatches."""
    flags = (
        "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 16 --lr 1e-2 "
        "--micro-batch-size 2 --global-batch-size 12 --train-iters 6 --mock-data --dry-run "
        "--dry-run-world-size 3"
    )
    config = parse(flags.split()).config
    places = [data_trace.place_of(config, position) for position in range(12, 24)]
    assert {one.iteration for one in places} == {2}
    assert [one.microbatch for one in places] == [0] * 6 + [1] * 6
    assert [one.replica for one in places] == [0, 0, 1, 1, 2, 2] * 2
    assert data_trace.positions_of(config, 2) == range(12, 24)
