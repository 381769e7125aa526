"""Saving while training goes on: a thread copies and writes, and all ranks publish together.

    begin     all ranks   make the folder, compare sizes with the disk
    copy      a thread    into host memory (see `staging`), beside the next forward and backward
    settle    this rank   before the next update: wait until copies are made
    write     a thread    the rank's part, without a word to other ranks
    written   all ranks   one number reduced, at the boundary of an iteration
    finish    all ranks   wait, compare problems, let rank 0 publish

Weights and states change in the update alone, so copies hide behind forward and backward (as in
CheckFreq, Mohan et al., 2021). The thread needs no process of its own: what takes time in it
(copies, checksums, writes, flushes) lets go of Python's lock, and it sees the rank's memory as it
is. One save is under way at a time; its copies lie in a `HostBuffer` that the next one uses again.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron.core import comm
from megatron.core.dist_checkpointing.format import Index
from megatron.core.dist_checkpointing.part import Part, mark
from megatron.core.dist_checkpointing.plan import Item
from megatron.core.dist_checkpointing.save import (
    SaveError,
    agree,
    agreed,
    agreed_partial,
    agreed_publish,
    attempt,
    prepare,
    publish,
    removing,
    whatever,
)
from megatron.core.dist_checkpointing.staging import HostBuffer, stage
from megatron.core.mesh import Axis


class BackgroundSave:
    """A save under way; making one is a collective of ``world``.

    Args:
        items: what this rank writes; it may change once `settle` has returned.
        final: the checkpoint's folder.
        facts: what the run says of itself.
        world: all ranks.
        buffer: where copies lie; nobody else may use it until the save ends. Pieces beyond its
            limit are written before `settle` returns.
        prepare_thread: called in every writing thread of the background.
        allowed: called on rank 0 before it publishes; raises OSError if it must not.

    Raises:
        SaveError: the folder cannot be made, or what all ranks write does not fit.
    """

    def __init__(
        self,
        items: Iterable[Item],
        final: Path,
        facts: Mapping[str, Any],
        world: Axis,
        buffer: HostBuffer,
        prepare_thread: Callable[[], None] | None = None,
        allowed: Callable[[], None] = lambda: None,
    ) -> None:
        self.final, self._facts, self._world = final, dict(facts), world
        self._allowed, self._partial = allowed, agreed_partial(final, world)
        self._part: Part | None = None
        self._problem: str | None = None
        self._given_up = False
        items = list(items)
        with removing(self._partial, world):
            size = agreed(lambda: stage(items).bytes, world)
            prepare(self._partial, size, world)
        if _device(items) is not None:
            torch.cuda.current_stream().synchronize()  # the thread copies on a stream of its own
        self._settled = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(items, buffer, prepare_thread), name="checkpoint", daemon=True
        )
        self._thread.start()

    def _run(
        self, items: list[Item], buffer: HostBuffer, prepare_thread: Callable[[], None] | None
    ) -> None:
        """Do all that this rank does alone; problems are told when all ranks finish."""
        try:
            self._attempt(lambda: self._copy(items, buffer))
        finally:
            self._settled.set()
        if self._problem is None:
            self._attempt(lambda: self._write(prepare_thread))

    def _copy(self, items: list[Item], buffer: HostBuffer) -> None:
        with _own_stream(_device(items)):
            staged = stage(items, buffer)
        self._part = Part(staged, self._partial, self._world.coordinate)
        if self._given_up:  # before there was a part to stop
            self._part.stop()
        self._part.put_views()

    def _write(self, prepare_thread: Callable[[], None] | None) -> None:
        assert self._part is not None
        self._part.put_copies(prepare_thread)
        self._part.finish()

    def settle(self) -> None:
        """Return when what is saved may change."""
        self._settled.wait()

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            self._problem = attempt(action, True)
        except Exception as error:
            # Such as no memory for the copies. Others must learn of it; the thread tells the rest.
            self._problem = f"{type(error).__name__}: {error}"
            raise

    def written(self, device: torch.device) -> bool:
        """Return whether every rank's thread has ended; a collective of the world."""
        mine = torch.tensor(not self._thread.is_alive(), dtype=torch.int32, device=device)
        comm.all_reduce(mine, self._world, "min")
        return bool(mine)

    def finish(self) -> Index | None:
        """Wait for every rank's part and publish; a collective of the world. Rank 0 gets the index.

        Raises:
            SaveError: some rank could not write; every rank raises, and nothing is left behind,
                unless the message says so.
        """
        self._join()
        with removing(self._partial, self._world):
            agree(self._problem, self._world)
            return agreed_publish(
                self._partial, self.final, self._facts, self._world, self._allowed
            )

    def rescue(self, seconds: float) -> Index | None:
        """End the save without a collective, when training cannot go on: publish if all is there.

        Every rank waits for its own thread. Rank 0 waits as long as ``seconds`` more for the marks
        of the others, which may be there no longer; without all of them nothing is published. The
        others wait for that as long: a rank that ends takes rank 0 with it. Rank 0 gets the index.

        Raises:
            SaveError: nothing was published, as far as this rank knows.
        """
        self._join()
        if self._problem is not None:
            raise SaveError(f"rank {self._world.coordinate}: {self._problem}")
        if self._world.coordinate != 0:
            _wait(lambda: not self._partial.exists(), seconds)
            return None
        if not _wait(lambda: not self._unfinished(), seconds):
            absent = ", ".join(str(rank) for rank in self._unfinished())
            raise SaveError(f"no part has come within {seconds:.0f} s from rank {absent}")
        published: list[Index] = []

        def act() -> None:
            self._allowed()
            published.append(publish(self._partial, self.final, self._world.size, self._facts))

        problem = whatever(act, True)
        if problem is not None:
            raise SaveError(problem)
        return published[0]

    def _unfinished(self) -> list[int]:
        """Return the ranks whose part is not there."""
        ranks = range(self._world.size)
        return [rank for rank in ranks if not (self._partial / mark(rank)).exists()]

    def abandon(self) -> None:
        """End the thread without finishing; what it wrote stays a folder that is no checkpoint."""
        self._given_up = True
        if self._part is not None:
            self._part.stop()
        self._join()

    def _join(self) -> None:
        self._thread.join()
        if self._part is not None:
            self._part.close()


def _device(items: Iterable[Item]) -> torch.device | None:
    """Return the CUDA device of ``items``, if they lie on one."""
    devices = (piece.device for item in items for piece in item.pieces)
    return next((device for device in devices if device.type == "cuda"), None)


@contextmanager
def _own_stream(device: torch.device | None) -> Iterator[None]:
    """Let a block's copies not queue behind what the device computes."""
    if device is None:
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    """Return whether a condition has come true within ``seconds``."""
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(0.05)
    return True
