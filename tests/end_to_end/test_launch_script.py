"""The launcher of the examples starts real processes; torchrun says how they ended."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "--device cpu --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 "
    "--max-position-embeddings 32 --vocab-size 60 --tokenizer-type NullTokenizer "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 2 --lr-warmup-iters 0 "
    "--log-interval 1 --eval-iters 0 --num-workers 0"
)


def start(save: Path, data: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run a script of the examples on two processes of this machine."""
    keep = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    told = {"PYTHON": sys.executable, "GPUS": "2", "SAVE": str(save), "DATA": data}
    errors = {"TORCHELASTIC_ERROR_FILE": str(save / "error.json"), "OMP_NUM_THREADS": "1"}
    save.mkdir()
    return subprocess.run(
        ["bash", str(ROOT / "examples" / "gpt3" / "345m.sh"), *TINY.split(), *flags],
        env={**keep, **told, **errors},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_script_trains_on_two_processes(tmp_path: Path) -> None:
    ran = start(tmp_path / "save", "mock")
    assert ran.returncode == 0, ran.stderr
    assert "launch: 2 processes (torchrun)" in ran.stdout
    rows = [json.loads(x) for x in (tmp_path / "save" / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2]
    status = json.loads((tmp_path / "save" / "run_status.json").read_text())
    # What job.sbatch looks for: complete, so not to be queued again.
    assert status["reason"] == "complete" and '"resubmit": false' in json.dumps(status)


def test_torchrun_leaves_the_exit_code_of_what_the_user_must_mend(tmp_path: Path) -> None:
    ran = start(tmp_path / "save", str(tmp_path / "absent"))
    assert ran.returncode == 1  # torchrun's own, whatever its processes ended with
    assert "absent.idx does not exist" in ran.stderr
    # What job.sbatch looks for.
    assert '"errorCode": 2' in (tmp_path / "save" / "error.json").read_text()
