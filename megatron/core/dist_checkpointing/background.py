"""Saving while training goes on: copies are made, a thread writes them, all ranks publish together.

    begin     all ranks   make the folder, compare sizes with the disk, copy (see `staging`)
    write     a thread    the rank's part, without a word to other ranks
    written   all ranks   one number reduced, at the boundary of an iteration
    finish    all ranks   wait, compare problems, let rank 0 publish

The thread needs no process of its own: what takes time in it (checksums, copies, writes, flushes)
lets go of Python's lock, and it sees the rank's memory as it is. One save is under way at a time;
its copies lie in a `HostBuffer` that the next one uses again.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.core import comm
from megatron.core.dist_checkpointing.format import Index
from megatron.core.dist_checkpointing.part import Part, mark
from megatron.core.dist_checkpointing.plan import Item
from megatron.core.dist_checkpointing.save import (
    PARTIAL,
    agree,
    agreed_publish,
    attempt,
    prepare,
    publish,
    removing,
)
from megatron.core.dist_checkpointing.staging import HostBuffer, Staged, stage
from megatron.core.mesh import Axis


class BackgroundSave:
    """A save under way; making one is a collective of ``world``.

    Args:
        items: what this rank writes; it may change as soon as the constructor returns.
        final: the checkpoint's folder.
        facts: what the run says of itself.
        world: all ranks.
        buffer: where copies lie; nobody else may use it until the save ends. Pieces beyond its
            limit are written before the constructor returns.
        prepare_thread: called in every writing thread of the background.

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
    ) -> None:
        self.final, self._facts, self._world = final, dict(facts), world
        self._partial = final.with_name(final.name + PARTIAL)
        self._part: Part | None = None
        self._problem: str | None = None
        items = list(items)
        with removing(self._partial, world):
            prepare(self._partial, stage(items).bytes, world)
        staged = stage(items, buffer)
        # A failure here is told when all ranks finish, as one in the background is.
        self._attempt(lambda: self._start(staged, prepare_thread))
        self._thread = threading.Thread(
            target=self._attempt, args=(self._write,), name="checkpoint", daemon=True
        )
        self._thread.start()

    def _start(self, staged: Staged, prepare_thread: Callable[[], None] | None) -> None:
        self._part = Part(staged, self._partial, self._world.coordinate, prepare_thread)
        self._part.put_views()

    def _write(self) -> None:
        if self._part is not None and self._problem is None:
            self._part.put_copies()
            self._part.finish()

    def _attempt(self, action: Callable[[], None]) -> None:
        problem = attempt(action, True)
        self._problem = self._problem or problem

    def written(self, device: torch.device) -> bool:
        """Return whether every rank's thread has ended; a collective of the world."""
        mine = torch.tensor(not self._thread.is_alive(), dtype=torch.int32, device=device)
        comm.all_reduce(mine, self._world, "min")
        return bool(mine)

    def finish(self) -> Index | None:
        """Wait for every rank's part and publish; a collective of the world. Rank 0 gets the index.

        Raises:
            SaveError: some rank could not write; every rank raises, and nothing is left behind.
        """
        self._join()
        with removing(self._partial, self._world):
            agree(self._problem, self._world)
            return agreed_publish(self._partial, self.final, self._facts, self._world)

    def rescue(self, seconds: float) -> Index | None:
        """End the save without a collective, when training cannot go on: publish if all is there.

        Every rank waits for its own thread. Rank 0 waits as long as ``seconds`` more for the marks
        of the others, which may be there no longer; without all of them nothing is published.
        """
        self._join()
        others = [self._partial / mark(rank) for rank in range(self._world.size)]
        if self._problem is not None or self._world.coordinate != 0:
            return None
        limit = time.monotonic() + seconds
        while not all(path.exists() for path in others):
            if time.monotonic() > limit:
                return None
            time.sleep(0.05)
        published: list[Index] = []
        attempt(
            lambda: published.append(
                publish(self._partial, self.final, self._world.size, self._facts)
            ),
            True,
        )
        return published[0] if published else None

    def abandon(self) -> None:
        """End the thread without finishing; what it wrote stays a folder that is no checkpoint."""
        if self._part is not None:
            self._part.stop()
        self._join()

    def _join(self) -> None:
        self._thread.join()
        if self._part is not None:
            self._part.close()
