"""Every Triton kernel compiles for GPUs of three generations, and none of them spills registers."""

import inspect
import os
import pkgutil
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.kernels import needs

pytestmark = pytest.mark.skipif(
    not needs.HAS_TRITON, reason="needs Triton beside torch: `make test-kernels` brings it"
)
TOOL = Path(__file__).resolve().parents[2] / "tools" / "compile_kernels.py"


def launched_kernels() -> set[str]:
    """Return the kernels that our modules launch: ``name[grid](``, or one of two in brackets."""
    from megatron.core.kernels import triton_ops

    found = set()
    for module in pkgutil.iter_modules(triton_ops.__path__):
        source = inspect.getsource(import_module(f"{triton_ops.__name__}.{module.name}"))
        names = set(re.findall(r"^def (_\w+)\(", source, re.MULTILINE))
        called = set(re.findall(r"(_\w+)\[", source))
        for pair in re.findall(r"\((_\w+) if [\w.]+ else (_\w+)\)\[", source):
            called |= set(pair)
        found |= {f"{module.name}.{name}" for name in called & names}
    return found


def test_no_kernel_spills_on_any_target() -> None:
    # In the interpreter nothing is compiled.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, str(TOOL)], capture_output=True, text=True, env=environment, timeout=900
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "for 3 targets; spills: none" in run.stdout
    compiled = set(re.findall(r"^\| (\w+\.\w+) ", run.stdout, re.MULTILINE))
    assert compiled == launched_kernels()
