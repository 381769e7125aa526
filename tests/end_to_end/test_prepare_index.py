"""tools/prepare_index.py builds exactly the index files that a training run looks for."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pretrain_gpt
from megatron.core.datasets.indexed import IndexedDatasetBuilder
from megatron.core.utils import UserError
from tools import prepare_index

ROOT = Path(__file__).resolve().parent.parent.parent
RUN = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 "
    "--max-position-embeddings 16 --global-batch-size 4 --train-iters 3 --lr 1e-3 --num-workers 0 "
    "--eval-iters 1 --eval-interval 2 --device cpu --tokenizer-type NullTokenizer --vocab-size 60"
)


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the flags of a run on a blend, whose cache is a folder ``cache``."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    generator, prefixes = np.random.default_rng(5), []
    for name in "ab":
        builder = IndexedDatasetBuilder(tmp_path / name, np.uint16)
        for _ in range(100):
            builder.add_document(generator.integers(0, 60, generator.integers(5, 40)))
        builder.finalize()
        prefixes.append(str(tmp_path / name))
    data = ["--data-path", "2", prefixes[0], "1", prefixes[1], "--split", "80,10,10"]
    return [*RUN.split(), *data, "--data-cache-path", str(tmp_path / "cache")]


def times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


@pytest.mark.parametrize("world", [1, 2])
def test_ds_17_a_run_finds_what_was_prepared(
    flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str], world: int
) -> None:
    """The number of processes is no part of it."""
    assert prepare_index.main([*flags, "--dry-run-world-size", str(world)]) == 0
    said = capfd.readouterr().out
    # Two corpora and their blend, in three splits.
    assert len(re.findall(r"^prepare_index: built [^:]*/cache/[0-9a-f]{32}-", said, re.M)) == 9
    assert "prepare_index: index: 0 files found, 9 built" in said
    before = times(tmp_path / "cache")
    assert pretrain_gpt.main(flags) == 0
    assert "\nindex: 9 files found, 0 built\n" in capfd.readouterr().out
    assert times(tmp_path / "cache") == before
    assert prepare_index.main(flags) == 0
    assert capfd.readouterr().out.count("prepare_index: hit   ") == 9


def test_a_run_without_preparation_says_what_it_built(
    flags: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert pretrain_gpt.main(flags) == 0
    assert "\nindex: 0 files found, 9 built\n" in capfd.readouterr().out


def test_ds_16_the_keys_do_not_depend_on_the_process(flags: list[str], tmp_path: Path) -> None:
    printed = []
    for seed in ("1", "2"):
        command = [sys.executable, str(ROOT / "tools" / "prepare_index.py"), *flags]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": seed}
        )
        assert done.returncode == 0, done.stderr
        printed.append(re.findall(r": (?:hit|built) +(\S+)$", done.stdout, re.M))
    assert len(printed[0]) == 9 and printed[0] == printed[1]


def test_a_batch_that_follows_from_the_processes_needs_their_number(
    flags: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    at = flags.index("--global-batch-size")
    free = flags[:at] + flags[at + 2 :]
    assert prepare_index.main([*free, "--dry-run-world-size", "2"]) == 0
    assert pretrain_gpt.main([*flags, "--global-batch-size", "4"]) == 0
    assert "\nindex: 9 files found, 0 built\n" in capfd.readouterr().out


def test_it_has_no_dry_run(flags: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="prepare_index has no dry run"):
        prepare_index.main([*flags, "--dry-run"])
    assert not (tmp_path / "cache").exists()
