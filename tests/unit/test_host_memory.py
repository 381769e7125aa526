"""Large pages for tensors in the machine's memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.training.processes.host_memory import HUGE_PAGES, ask_for_huge_pages

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
PROGRAM = """
import re
from pathlib import Path
from megatron.training import arguments

def main():
    import torch
    kept = torch.ones(2**24)
    found = re.search(r"AnonHugePages: *(\\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    print(found[1])

arguments.run_main(main, "a program")
"""


def test_the_environment_has_the_last_word() -> None:
    assert HUGE_PAGES == "THP_MEM_ALLOC_ENABLE"
    for given, found in (({}, "1"), ({HUGE_PAGES: "0"}, "0"), ({HUGE_PAGES: "1"}, "1")):
        environ: dict[str, str] = dict(given)
        ask_for_huge_pages(environ)
        assert environ == {HUGE_PAGES: found}


@pytest.mark.skipif(
    not SETTING.exists() or "[madvise]" not in SETTING.read_text(),
    reason=f"large pages by request: only where {SETTING} says [madvise]",
)
@pytest.mark.parametrize("asked", [True, False])
def test_a_programs_tensors_lie_in_large_pages(asked: bool) -> None:
    """Three quarters at least of 64 MiB; none where the user says so."""
    environ = {name: value for name, value in os.environ.items() if name != HUGE_PAGES}
    environ |= {} if asked else {HUGE_PAGES: "0"}
    command = [sys.executable, "-c", PROGRAM]
    printed = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    kibibytes = int(printed.stdout)
    assert kibibytes >= 48 * 1024 if asked else kibibytes == 0
