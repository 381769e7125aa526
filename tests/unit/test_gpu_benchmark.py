"""benchmarks/gpu.py where there is no GPU: one message; and a rehearsal, which proves no figure."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.core.kernels import table

ROOT = Path(__file__).resolve().parents[2]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *words],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
        check=False,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_ends_with_one_message() -> None:
    ended = run()
    assert ended.returncode == 2 and ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert line.startswith("gpu: error: ") and "sees no CUDA device" in line
    assert torch.__version__ in line and "benchmarks/train_step.py" in line


@pytest.mark.slow
def test_it_can_be_tried_on_the_cpu(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    ended = run("--device", "cpu", "--size", "T", "--steps", "2", "--json", str(path))
    assert ended.returncode == 0, ended.stderr
    found = json.loads(path.read_text())
    plain, ours = found["models"]
    assert [plain["contestant"], ours["contestant"]] == ["plain", "megatron"]
    # The same model and micro-batch, but other initial values: near the log of the vocabulary.
    assert plain["micro_batch"] == ours["micro_batch"] == 4
    for row in (plain, ours):
        assert row["first_loss"] == pytest.approx(6.24, abs=0.1) and row["mfu"] is None
    by_name = {row["name"]: row for row in found["attention"]}
    assert by_name["sdpa"]["ms"] > 0 and "needs a CUDA device" in by_name["flash_attn"]["reason"]
    assert len(found["products"]) == 4


def test_fused_operations_are_listed_beside_torchs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    fused = importlib.import_module("fused")
    sizes = fused.Sizes(tokens=4, hidden=8, head=4, keys=4, columns=9, parameters=10)
    fused.show(torch.device("cpu"), 1, sizes)
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["op", "backend", "ms", "of", "reference", "of", "torch"]
    found: dict[str, dict[str, str]] = {}
    for line in lines:
        found.setdefault(line[:18].strip(), {})[line[19:39].strip()] = line[40:]
    for op, backends in found.items():
        assert set(backends) == {*table.TABLE[op], "torch's op"}
        assert "needs a CUDA device" in backends["triton"]
        assert float(backends["reference"].split()[1]) == 1.0
        assert float(backends["torch's op"].split()[2]) == 1.0
