"""Large pages for tensors in the machine's memory, and memory that stays."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.training.processes.host_memory import (
    HUGE_PAGES,
    SETTINGS,
    TUNABLES,
    ask_for_huge_pages,
    keep_freed_memory,
)

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


FAULTS = """
import resource
from megatron.training import arguments

def main():
    import torch
    for step in range(4):  # of 192 MiB, of which the last should find what those before it left
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        tensors = [torch.ones(6 * 2**20) for _ in range(8)]
        del tensors
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

arguments.run_main(main, "a program")
"""
GLIBC = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="freed memory is kept where the C library is glibc"
)


@GLIBC
@pytest.mark.parametrize("setting", [None, *SETTINGS, TUNABLES])
def test_a_program_keeps_what_tensors_leave(setting: str | None) -> None:
    """A page of 4 KiB costs a fault each time that the system gives it."""
    left_alone = {name: value for name, value in os.environ.items() if not name.startswith("MALL")}
    values = dict.fromkeys(SETTINGS, str(2**20)) | {TUNABLES: "glibc.malloc.trim_threshold=65536"}
    chosen = {} if setting is None else {setting: values[setting]}
    environ = left_alone | {HUGE_PAGES: "0"} | chosen
    command = [sys.executable, "-c", FAULTS]
    printed = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    pages = 192 * 2**20 // os.sysconf("SC_PAGE_SIZE")
    faults = int(printed.stdout)
    assert faults < pages / 10 if setting is None else faults > pages / 2


def test_another_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("musl", "1.2"))
    assert not keep_freed_memory({})
