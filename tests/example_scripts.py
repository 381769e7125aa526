"""Runs of the examples' scripts, and what they would start."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_script(
    path: str, *words: str, timeout: float = 120, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a script of the examples, from a folder that is not the repository's.

    Args:
        path: below examples/.
        words: flags after its name.
        timeout: seconds.
        variables: of its environment, which has little else.
    """
    keep = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    environment = {**keep, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, **variables}
    return subprocess.run(
        ["bash", str(ROOT / "examples" / path), *words],
        cwd="/",
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def write_recorder(folder: Path) -> str:
    """Return an interpreter, in ``folder``, that prints what it is given, a word a line."""
    path = folder / "recorder"
    path.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    path.chmod(0o755)
    return str(path)
