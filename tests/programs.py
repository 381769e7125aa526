"""Whole runs of a program on several ranks of the worker pool, started as a launcher would.

The ranks find their places in the environment, meet at a port, and make their own process group;
only the processes are the pool's, so that a run costs its work and no start of an interpreter.
"""

import importlib
import io
import os
import socket
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from tests.harness import Pool

ROOT = Path(__file__).resolve().parent.parent


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


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _launched(rank: int, module: str, words: list[str], folder: str, port: int) -> Ended:
    dist.destroy_process_group()  # the harness's own: a program makes its group itself
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
