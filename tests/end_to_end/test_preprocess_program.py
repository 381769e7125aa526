"""preprocess_data.py as a program: flags of real launches, exit codes, kills, what is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.core.utils import UserError
from tests.end_to_end.preprocess_tool import BYTES, ROOT, run, tree, write_lines
from tools import preprocess_data

LAUNCHES = [
    "--vocab-file v --merge-file m --tokenizer-type GPT2BPETokenizer --append-eod --workers 20 "
    "--chunk-size 25",
    "--vocab v --tokenizer-type BertWordPieceLowerCase --split-sentences --workers 8",
    "--dataset-impl mmap --json-key inputs --tokenizer-type PretrainedFromHF "
    "--tokenizer-name-or-path t --append-eod --workers 35",
    "--dataset_impl mmap --tokenizer_type SentencePieceTokenizer --workers 2 --chunk_size 32",
    "--json-keys text title --split-sentences --workers 5 --log_interval 2 --lang english",
    "--jsonl-keys chosen --tokenizer-model t --partitions 4 --keep-sequential-samples",
    "--find-optimal-num-workers --workers-to-check 4 8 16 --max-documents 1_000",
]


@pytest.mark.parametrize("launch", LAUNCHES)
def test_flags_of_real_launches_are_understood(launch: str) -> None:
    from megatron.training.arguments import parse_tool

    words = ["--input", "c.json", "--output_prefix", "o", *launch.split()]
    parsed = parse_tool(
        words, preprocess_data.ToolConfig, "preprocess_data", others=preprocess_data.OTHERS
    )
    assert parsed.config.preprocess.output_prefix == "o"
    accepted = " ".join([*parsed.no_effect, *parsed.renamed])
    for flag in ("--chunk-size", "--keep-sequential-samples", "--dataset-impl mmap", "--vocab v"):
        assert (flag in accepted) == (flag in launch.replace("_", "-"))


def start(*words: object, **kwargs) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), *map(str, words)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, **kwargs
    )


def test_the_program_ends_with_two_and_one_message(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "c.jsonl", [{"text": "a"}, {"title": "b"}])
    done = start("--input", source, "--output-prefix", "set", *BYTES, "--workers", 2, cwd=tmp_path)
    assert done.returncode == 2
    assert "line 2" in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.jsonl"]


def test_the_program_starts_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from tools.preprocess_data import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "--append-eod" in done.stdout


def test_a_killed_worker_is_an_error_not_a_hang(tmp_path: Path, monkeypatch) -> None:
    from megatron.core.datasets.preprocess import records

    def die(self, block):
        os._exit(9)

    monkeypatch.setattr(records.Parser, "parse", die)
    source = write_lines(tmp_path / "c.jsonl", [{"text": "a"}])
    before = tree(tmp_path)
    with pytest.raises(UserError, match="worker process was killed"):
        run("--input", source, "--output-prefix", tmp_path / "set", *BYTES, "--workers", 2)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("workers", [1, 2])
def test_a_terminated_run_leaves_nothing(tmp_path: Path, workers: int) -> None:
    source = write_lines(tmp_path / "c.jsonl", [{"text": "x" * 100_000}] * 400)
    command = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", str(source)]
    command += ["--output-prefix", str(tmp_path / "set"), *BYTES, "--workers", str(workers)]
    # Sentences make it slow enough to be met half-way.
    process = subprocess.Popen([*command, "--split-sentences"], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".set*")) and time.monotonic() < deadline:
        assert process.poll() is None, "it ended before it was met"
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert [path.name for path in tmp_path.iterdir()] == ["c.jsonl"]


def test_a_failed_run_keeps_the_last_output(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "c.jsonl", [{"text": "good"}])
    flags = ["--input", source, "--output-prefix", tmp_path / "set", *BYTES]
    run(*flags)
    before = {k: v for k, v in tree(tmp_path).items() if k.startswith("set")}
    write_lines(source, [{"text": "other"}, {"bad": 1}])
    with pytest.raises(UserError):
        run(*flags)
    assert {k: v for k, v in tree(tmp_path).items() if not k.startswith("c.")} == before
