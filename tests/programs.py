"""Whole runs of a program on several ranks of the worker pool, started as a launcher would.

The ranks find their places in the environment, meet at a port, and make their own process group;
only the processes are the pool's, so that a run costs its work and no start of an interpreter.
"""

import importlib
import json
import multiprocessing
import os
import random
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron.training import arguments
from tests.harness import Pool, RankFailed

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
    with tempfile.TemporaryDirectory() as printed:
        arguments = (module, [str(word) for word in words], str(folder), printed, free_port())
        try:
            return pool.run(world, _launched, *arguments, timeout=timeout)
        except (RankFailed, TimeoutError) as error:
            # A rank that ended its process, or hangs, cannot hand over what it has printed.
            for file in sorted(Path(printed).iterdir()):
                error.add_note(f"printed in {file.name}:\n{file.read_text(encoding='utf-8')}")
            raise


@dataclass(frozen=True)
class ByHand:
    """Processes that were started one by one, as a launcher would, and may fail."""

    processes: list[BaseProcess]
    errors: Path
    """What all of them write on stderr."""

    def codes(self, timeout: float = 120.0) -> list[int | None]:
        """Wait for the end of all and return their exit codes; None for one that had to be killed.

        Args:
            timeout: seconds.
        """
        end = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        found = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.kill()
            process.join()
        return found

    def wait_for(self, text: str, timeout: float = 120.0) -> None:
        """Return when ``text`` was written on stderr."""
        end = time.monotonic() + timeout
        while not self.errors.exists() or text not in self.errors.read_text():
            assert time.monotonic() < end, f"{text!r} was never said"
            assert any(process.is_alive() for process in self.processes), self.errors.read_text()
            time.sleep(0.05)


def by_hand(
    module: str,
    words: Sequence[object],
    *,
    folder: Path,
    world: int,
    ranks: Sequence[int] | None = None,
    own_words: Mapping[int, Sequence[object]] | None = None,
    port: int | None = None,
) -> ByHand:
    """Start ``module.main`` in processes of their own, which end as a program does.

    Their input is open and says nothing.

    Args:
        module: such as ``pretrain_gpt``.
        words: of the command line.
        folder: to work in.
        world: what each is told of their number.
        ranks: those that are started; all when absent.
        own_words: further words by rank.
        port: where they meet; a free one when absent.
    """
    context = multiprocessing.get_context("forkserver")
    processes: list[BaseProcess] = []
    port = port or free_port()
    for rank in range(world) if ranks is None else ranks:
        told = [str(word) for word in (*words, *(own_words or {}).get(rank, ()))]
        arguments = (module, told, str(folder), rank, world, port)
        process = context.Process(target=_by_hand, args=arguments)
        process.start()
        processes.append(process)
    return ByHand(processes, folder / "err")


def _by_hand(module: str, words: list[str], folder: str, rank: int, world: int, port: int) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "TORCHELASTIC", "PMI_")):
            del os.environ[name]
    _take_place(rank, world, port)
    os.chdir(folder)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    os.dup2(os.open(f"out.{rank}", flags), 1)
    os.dup2(os.open("err", flags), 2)
    os.dup2(os.pipe()[0], 0)
    sys.stdin = open(0, encoding="utf-8")  # noqa: SIM115  (as long as the process)
    name = module.rpartition(".")[2]
    sys.argv = [f"{name}.py", *words]
    arguments.run_main(importlib.import_module(module).main, name)


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
            assert here[name] == _nearly(value), f"{name} of iteration {there['iteration']}"


def _nearly(value: Any) -> Any:
    """Return what equals ``value`` where its numbers are equal to 1e-10."""
    if isinstance(value, dict):
        return {name: _nearly(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_nearly(one) for one in value]
    return pytest.approx(value, rel=1e-10, abs=0) if isinstance(value, float) else value


def free_port() -> int:
    """Return a port that nobody listens at.

    Below those that the system hands out by itself: one of these may be some other connection's
    before a program listens at it.
    """
    while True:
        port = random.SystemRandom().randrange(15_000, 30_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def _take_place(rank: int, world: int, port: int) -> None:
    """Say in the environment what a launcher would."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )


def _launched(
    rank: int, module: str, words: list[str], folder: str, printed: str, port: int
) -> Ended:
    # A program makes its group itself. The pool's is left when all have joined it: whoever leaves
    # earlier closes connections that others are still making.
    dist.barrier()
    dist.destroy_process_group()
    _take_place(rank, int(os.environ["WORLD_SIZE"]), port)
    sys.path[:] = list(dict.fromkeys([str(ROOT), *sys.path]))
    before = Path.cwd()
    said, told = (Path(printed) / f"{name}.{rank}" for name in ("out", "err"))
    os.chdir(folder)
    try:
        with (
            said.open("w", encoding="utf-8", buffering=1) as out,
            told.open("w", encoding="utf-8", buffering=1) as err,
            redirect_stdout(out),
            redirect_stderr(err),
        ):
            code = importlib.import_module(module).main(words)
    finally:
        os.chdir(before)
    return Ended(code, *(file.read_text(encoding="utf-8") for file in (said, told)))
