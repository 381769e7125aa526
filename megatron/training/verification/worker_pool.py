"""A pool of worker processes that runs one distributed job after another on this machine's CPU.

Starting eight processes takes some ten seconds, a job in a running pool a tenth of one. Workers are
forked from a server that has torch imported; each job gets a gloo process group of its own over the
ranks it needs. A job is a module-level function ``body(rank, *arguments)``: what it returns comes
back in rank order, and a rank's exception is raised by `Pool.run` with that rank's traceback.

    with Pool() as pool:
        sums = pool.run(4, add_up, 17)     # add_up(rank, 17) on ranks 0 to 3

Arguments and results travel as pickles. The environment tells a body its place as a launcher would
(RANK, WORLD_SIZE, LOCAL_RANK); what it changes in the environment, the default dtype or the global
generator does not reach the next job. Every worker computes with one thread.

A job that fails or does not end in time kills the workers, since ranks that wait for the failed one
would wait for ever; the next job starts new ones.
"""

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from megatron.training.failing import failure

Body = Callable[..., Any]
GRACE = 5.0
"""Seconds beyond a job's time limit in which its own collectives may still report the delay."""


class RankFailed(RuntimeError):
    """A rank raised or died; the message is its traceback."""


class Pool:
    """Workers that run jobs on 1 to any number of ranks; they are started when first needed."""

    def __init__(self, preload: Sequence[str] = ()) -> None:
        """Start nothing yet.

        Args:
            preload: modules that the workers shall have imported already, beside torch.
        """
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__, *preload])
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._store: TCPStore | None = None
        self._jobs = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(self, world: int, body: Body, *arguments: Any, timeout: float = 60.0) -> list[Any]:
        """Run ``body`` on ``world`` ranks and return what each returned.

        Args:
            world: number of ranks.
            body: a function at the top of a module that the workers can import.
            arguments: of the body, after the rank.
            timeout: seconds that the job, and each of its collectives, may take.

        Raises:
            RankFailed: a rank raised.
            TimeoutError: the job did not end in time, or a rank waited too long for another.
        """
        if not all(process.is_alive() for process, _ in self._workers):
            self.close()  # somebody has ended this process's children
        self._grow(world)
        self._jobs += 1
        for rank in range(world):
            self._workers[rank][1].send((self._jobs, world, timeout, body, arguments))
        answers: dict[int, tuple[bool, Any]] = {}
        pending = {self._workers[rank][1]: rank for rank in range(world)}
        deadline = time.monotonic() + timeout + GRACE
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                raise TimeoutError(f"ranks {sorted(pending.values())} did not end in {timeout} s")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                try:
                    answers[rank] = connection.recv()
                except EOFError:
                    self.close()
                    raise RankFailed(f"rank {rank} died") from None
                if not answers[rank][0]:
                    self.close()
                    text, is_late = answers[rank][1]
                    if is_late:
                        raise TimeoutError(f"rank {rank} waited longer than {timeout:g} s: {text}")
                    raise RankFailed(f"rank {rank} of {world}:\n{text}")
        return [answers[rank][1] for rank in range(world)]

    def close(self) -> None:
        """End the workers; the next job starts new ones."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
        for process, _ in self._workers:
            process.join()
        self._workers.clear()
        self._store = None

    def _grow(self, world: int) -> None:
        _start_server()
        if self._store is None:
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        while len(self._workers) < world:
            here, there = self._context.Pipe()
            process = self._context.Process(
                target=_serve, args=(len(self._workers), self._store.port, there), daemon=True
            )
            process.start()
            there.close()
            self._workers.append((process, here))


def _start_server() -> None:
    """Start the server that forks workers, unless it runs, so that it finds what is to be imported.

    Until Python 3.12 it looks for modules on the path that an interpreter starts with, not on the
    path of this process, and says nothing of those that it does not find.
    """
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


def _serve(rank: int, port: int, connection: Connection) -> None:
    """Run jobs until the process that owns the pool goes away."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    environment = dict(os.environ)
    while True:
        try:
            number, world, timeout, body, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, _job(store, number, rank, world, timeout, body, arguments)))
        except BaseException as error:
            late = failure.describe(error).is_late
            text = str(error).strip().split("\n", 1)[0] if late else traceback.format_exc()
            connection.send((False, (text, late)))
        finally:
            # A job must not leave its traces to the next.
            torch.manual_seed(0)
            torch.set_default_dtype(torch.float32)
            os.environ.clear()
            os.environ.update(environment)


def _job(
    store: Store,
    number: int,
    rank: int,
    world: int,
    timeout: float,
    body: Body,
    arguments: tuple[Any, ...],
) -> Any:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    dist.init_process_group(
        "gloo",
        store=PrefixStore(f"job{number}", store),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )
    try:
        dist.barrier()  # a body may leave at once, when others are still connecting
        result = body(rank, *arguments)
        if dist.is_initialized():  # else the body has left it, to make one of its own
            # A rank that is done early must not hang up on one that is still connecting.
            dist.barrier()
        return result
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
