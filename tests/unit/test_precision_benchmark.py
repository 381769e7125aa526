"""benchmarks/precision.py: 200 iterations in half precision stay within their bounds of fp32's."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "precision.py"), *words],
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )


@pytest.mark.slow
def test_curves_stay_within_their_bounds(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    ended = run("--runs", "bf16", "fp16", "fp16-moments", "--json", str(path))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(path.read_text())
    assert found["fp16"]["skipped"] > 0 == found["bf16"]["skipped"]
    assert all(0 < one["largest"] < 0.03 and one["loss"] < 4 for one in found.values())


@pytest.mark.slow
def test_what_leaves_its_bounds_is_said(tmp_path: Path) -> None:
    """A script with narrower ones."""
    script = (ROOT / "benchmarks" / "precision.py").read_text()
    narrow = script.replace('"bf16": (0.03, 0.015)', '"bf16": (1e-9, 1e-9)')
    assert narrow != script
    path = tmp_path / "precision.py"
    path.write_text(narrow.replace("Path(__file__).resolve().parent.parent", f'Path("{ROOT}")'))
    words = [sys.executable, str(path), "--runs", "bf16", "--iterations", "30"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 1
    assert "out of bounds: bf16" in ended.stdout
