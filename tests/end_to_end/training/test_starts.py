"""How a run starts: without a launcher, with an old launcher's words, where it cannot write."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.core.utils import UserError
from megatron.training import pretrain
from megatron.training.processes.launch import Launch
from tests.end_to_end.training.runs import flags
from tests.programs import ROOT


def test_env_04_without_a_launcher_one_process_just_works(corpus: str, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *flags(corpus, "--train-iters", 2)]
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "launch: 1 process (no launcher)" in done.stdout
    assert "iteration        2/       2" in done.stdout


@pytest.mark.parametrize(("environ", "expected"), [({}, 3), ({"LOCAL_RANK": "1"}, 1)])
def test_a_launchers_local_rank_counts_unless_the_environment_has_one(
    run: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    expected: int,
) -> None:
    places: list[Launch] = []
    monkeypatch.setattr(
        pretrain, "pretrain", lambda parsed, place, program: places.append(place) or 0
    )
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", **environ}.items():
        monkeypatch.setenv(name, value)
    assert run("--train-iters", 1, "--local_rank", 3) == 0
    assert [place.local_rank for place in places] == [expected]


@pytest.mark.parametrize(
    ("flag", "place"),
    [
        ("--save", "/proc/x"),
        ("--save", "/dev/null"),
        ("--save", "file"),
        ("--save", "tracked"),
        ("--metrics-file", "."),
        ("--metrics-file", "/proc/x/metrics"),
        ("--tensorboard-dir", "/proc/x"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_any_work(
    run: Callable[..., int], flag: str, place: str
) -> None:
    Path("file").touch()
    Path("tracked", "latest_checkpointed_iteration.txt").mkdir(parents=True)
    with pytest.raises(UserError, match=f"^{flag} {re.escape(place)}"):
        run("--train-iters", 2, flag, place)
    assert not Path("metrics.jsonl").exists()
