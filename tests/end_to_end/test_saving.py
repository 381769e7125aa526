"""Whole runs of pretrain_gpt.py that recompute or offload: the numbers of one that does neither."""

import json
from pathlib import Path
from typing import Any

import pytest

import pretrain_gpt
from tests.programs import TIMED

RUN = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 16 "
    "--seq-length 16 --micro-batch-size 2 --global-batch-size 4 --train-iters 3 --lr 1e-2 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 60 --device cpu --num-workers 0 "
    "--eval-iters 1 --eval-interval 2 --log-interval 1 --metrics-file metrics.jsonl"
)
WAYS = {
    "old": "--checkpoint-activations",
    "parts": "--recompute-granularity selective --recompute-modules core_attn mlp layernorm",
    "moved": "--fine-grained-activation-offloading --min-offloaded-tensor-size 1 --offload-modules "
    "attn_norm mlp_norm core_attn attn_proj",
}


def rows(folder: Path, monkeypatch: pytest.MonkeyPatch, words: str) -> list[dict[str, Any]]:
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert pretrain_gpt.main([*RUN.split(), *words.split()]) == 0
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [{name: value for name, value in row.items() if name not in TIMED} for row in found]


def test_a_run_logs_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    plain = rows(tmp_path / "plain", monkeypatch, "")
    assert len(plain) >= 4  # three iterations, and evaluations
    for way, words in WAYS.items():
        assert rows(tmp_path / way, monkeypatch, words) == plain, way
    shown = capsys.readouterr().out
    assert "--checkpoint-activations -> --recompute-granularity full" in shown
    assert "offload_modules" in shown  # among the settings that are not defaults
