"""Whole runs of a program on several ranks of the worker pool, started as a launcher would.

The ranks find their places in the environment, meet at a port, and make their own process group;
only the processes are the pool's, so that a run costs its work and no start of an interpreter.
"""

import importlib
import io
import json
import os
import socket
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.harness import Pool

ROOT = Path(__file__).resolve().parent.parent
TIMED = ("elapsed_ms", "tokens_per_second", "memory_bytes", "throughput", "mfu", "attempt")
"""What a metrics file says of the machine and the restarts, not of the model."""
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Ended:
    """How one rank's program ended."""

    code: int
    out: str
    err: str


def launch(
    pool: Pool, world: int, module: str, *words: object, folder: Path, timeout: float = 120.0
) -> list[Ended]:
    """Run ``module.main`` on ``world`` ranks and return how each ended.

    Args:
        pool: of workers.
        world: ranks.
        module: such as ``pretrain_gpt``.
        words: of the command line.
        folder: to work in.
        timeout: seconds.
    """
    arguments = (module, [str(word) for word in words], str(folder), free_port())
    return pool.run(world, _launched, *arguments, timeout=timeout)


def metrics(path: Path) -> Rows:
    """Return the rows of a metrics file, without times, memory and restarts."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: row[name] for name in row if name not in TIMED} for row in found]


def assert_rows_equal(found: Rows, expected: Rows) -> None:
    """Compare all that two metrics files say, numbers to 1e-10."""
    assert len(found) == len(expected) > 0
    for here, there in zip(found, expected, strict=True):
        assert here.keys() == there.keys()
        for name, value in there.items():
            if isinstance(value, float):
                value = pytest.approx(value, rel=1e-10, abs=0)
            assert here[name] == value, f"{name} of iteration {there['iteration']}"


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _launched(rank: int, module: str, words: list[str], folder: str, port: int) -> Ended:
    # A program makes its group itself. The pool's is left when all have joined it: whoever leaves
    # earlier closes connections that others are still making.
    dist.barrier()
    dist.destroy_process_group()
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"],
        OMP_NUM_THREADS="1",
    )
    sys.path[:] = list(dict.fromkeys([str(ROOT), *sys.path]))
    before, out, err = Path.cwd(), io.StringIO(), io.StringIO()
    os.chdir(folder)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = importlib.import_module(module).main(words)
    except BaseException as error:
        error.add_note(f"printed by rank {rank}:\n{out.getvalue()}{err.getvalue()}")
        raise
    finally:
        os.chdir(before)
    return Ended(code, out.getvalue(), err.getvalue())
