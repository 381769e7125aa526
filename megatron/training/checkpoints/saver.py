"""The saves of a run, one after the other: at once, or beside training under --async-save.

Saving beside training, the loop goes on while copies are made and written; before its next update
it waits for the copies. After each iteration all ranks
compare, by one number, whether everybody has written; then rank 0 publishes, the tracker moves and
retention follows, all at that boundary. A save that is due while one is under way waits for it. The
last save of a process is never in the background: there is no training to hide it behind.
"""

import copy
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron.core.dist_checkpointing import catalog, priority
from megatron.core.dist_checkpointing.background import BackgroundSave
from megatron.core.dist_checkpointing.save import SaveError, agree
from megatron.core.dist_checkpointing.staging import HostBuffer
from megatron.core.utils import UserError
from megatron.training.checkpoints import save as saving
from megatron.training.checkpoints.recovery import save_recovery
from megatron.training.checkpoints.run import CheckpointedRun
from megatron.training.checkpoints.save import Saved
from megatron.training.failing.failure import SaveFailed
from megatron.training.state import TrainState

PATIENCE = 30.0
"""Seconds that rank 0 waits for the other ranks' parts when training has failed."""


@dataclass
class _Pending:
    """A save under way."""

    save: BackgroundSave
    state: TrainState
    begun: float
    stall: float


class Saver:
    """Saves what a run is; making it and its methods are collectives, but where they say so.

    Args:
        run: what is saved, and where to.
        saved: told the folder of every checkpoint when it is there, and the state it holds.

    Raises:
        UserError: the system refuses the priorities of the writing threads on some rank; every
            rank raises.
    """

    def __init__(self, run: CheckpointedRun, saved: Callable[[Path, TrainState], None]) -> None:
        self._run, self._saved = run, saved
        self._speed = run.config.speed
        self._buffer = HostBuffer(self._speed.host_limit)
        self._pending: _Pending | None = None
        self.longest = 0.0
        """Seconds of the longest save from begin to end."""
        if self._speed.async_save and priority.settable():
            problem = priority.refusal(*self._priorities)
            if problem is not None:
                problem = (
                    f"--async-ckpt-cpu-priority {self._priorities[0]}, "
                    f"--async-ckpt-io-priority {self._priorities[1]}: {problem}"
                )
            agree(problem, run.mesh.world, UserError)

    @property
    def _priorities(self) -> tuple[int, int]:
        return self._speed.async_ckpt_cpu_priority, self._speed.async_ckpt_io_priority

    @property
    def bytes(self) -> int:
        """Return the bytes of host memory that copies lie in."""
        return self._buffer.bytes

    def save(self, state: TrainState, last: bool) -> None:
        """Save ``state``, after the save that is under way.

        Raises:
            SaveFailed: it failed, and it is the last one or --exit-on-failed-save.
        """
        self.finish()
        if self._speed.async_save and not last:
            self._begin(state)
            return
        self._ended(saving.save_checkpoint(self._run, state), state, last)

    def recover(self, state: TrainState) -> None:
        """Save ``state`` at once where recovery checkpoints are; raises as `save` does.

        The save that is under way ends first: it holds an older state, and whatever is published
        last counts as the newest.
        """
        self.finish()
        self._ended(save_recovery(self._run, state), state, last=False)

    def look(self) -> None:
        """Publish the save that is under way if all ranks have written; else do nothing.

        Raises:
            SaveFailed: it failed, and --exit-on-failed-save.
        """
        if self._pending is not None and self._pending.save.written(self._run.mesh.device):
            self.finish()

    def settle(self) -> None:
        """Wait until what is saved may change: to be called before every update; no collective."""
        if self._pending is not None:
            begin = time.monotonic()
            self._pending.save.settle()
            self._pending.stall += time.monotonic() - begin

    def finish(self) -> None:
        """Wait for the save that is under way and publish it; raises as `look` does."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        begin = time.monotonic()
        save, iteration = pending.save, pending.state.iteration
        try:
            index = save.finish()
            saving.move_tracker(save.final.parent, iteration, self._run.mesh)
        except SaveError as error:
            seconds = time.monotonic() - pending.begun
            saved = saving.failed(self._run, iteration, error, seconds)
        else:
            now = time.monotonic()
            saved = Saved(
                save.final,
                None,
                now - pending.begun,
                index.bytes if index is not None else 0,
                pending.stall + now - begin,
            )
            saving.conclude(self._run, iteration, saved, index)
        self._ended(saved, pending.state, last=False)

    def rescue(self, *, alike: bool) -> None:
        """End the save that is under way when training has failed; no collective.

        What goes wrong here is a warning: the failure of training is what counts.

        Args:
            alike: every rank has failed for the same reason, so that all parts will be there.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            self._end(pending, alike=alike)
        except SaveError as error:
            self._run.say(f"WARNING: the save that was under way was not finished: {error}")
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self._run.say(
                f"WARNING: ending the save that was under way failed: {type(error).__name__}: "
                f"{error}; what is in {pending.save.final.parent} is found at the next start"
            )

    def _end(self, pending: _Pending, *, alike: bool) -> None:
        iteration = pending.state.iteration
        if not alike and self._run.mesh.world.size > 1:
            pending.save.abandon()
            self._run.say(
                f"WARNING: the save of iteration {iteration}, which was under way, is given up, "
                "since not all ranks have failed alike; what is there of it is no checkpoint, and "
                "the next save removes it"
            )
            return
        index = pending.save.rescue(PATIENCE)
        if index is not None:
            catalog.write_tracker(pending.save.final.parent, iteration)
            self._run.say(f"iteration {iteration}, whose save was under way, is saved")
            self._saved(pending.save.final, pending.state)

    def _begin(self, state: TrainState) -> None:
        begun = time.monotonic()
        final = saving.announced(self._run, state)
        try:
            saving.clear(self._run, final.parent)
            everything, stored = saving.gathered(self._run, state)
            save = BackgroundSave(
                everything,
                final,
                stored,
                self._run.mesh.world,
                self._buffer,
                self._lower if priority.settable() else None,
                self._run.check_lease,
            )
        except SaveError as error:
            seconds = time.monotonic() - begun
            saved = saving.failed(self._run, state.iteration, error, seconds)
            self._ended(saved, state, last=False)
            return
        stall = time.monotonic() - begun
        self._run.say("  training goes on; the checkpoint is written meanwhile")
        self._pending = _Pending(save, copy.deepcopy(state), begun, stall)

    def _lower(self) -> None:
        priority.lower_thread(*self._priorities)

    def _ended(self, saved: Saved, state: TrainState, last: bool) -> None:
        self.longest = max(self.longest, saved.seconds)
        if saved.folder is not None:
            self._saved(saved.folder, state)
        elif last or self._run.config.exit_on_failed_save:
            raise SaveFailed(f"iteration {state.iteration} was not saved: {saved.error}")
