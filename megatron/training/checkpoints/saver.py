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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from megatron.core.dist_checkpointing import catalog, priority
from megatron.core.dist_checkpointing.background import BackgroundSave
from megatron.core.dist_checkpointing.lease import Lease
from megatron.core.dist_checkpointing.save import SaveError
from megatron.core.dist_checkpointing.staging import HostBuffer
from megatron.core.mesh import Mesh
from megatron.core.utils import Say, UserError
from megatron.training.checkpoint_config import CheckpointConfig
from megatron.training.checkpoints import save as saving
from megatron.training.checkpoints.contents import Optimizer
from megatron.training.checkpoints.facts import RunFacts
from megatron.training.checkpoints.recovery import save_recovery
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
    """Saves what a run is; its methods are collectives of the world, but where they say so.

    Args:
        config: where to, and how.
        mesh: this rank's place.
        models: the model chunks.
        optimizer: None to save weights alone.
        run: what the run says of itself.
        say: takes lines for the log.
        saved: told the folder of every checkpoint when it is there, and the state it holds.
        lease: rank 0's right to save there; nothing is saved when it is lost.

    Raises:
        UserError: the system refuses the priorities of the writing threads.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        mesh: Mesh,
        models: Sequence[nn.Module],
        optimizer: Optimizer | None,
        run: RunFacts,
        say: Say,
        saved: Callable[[Path, TrainState], None],
        lease: Lease | None = None,
    ) -> None:
        self._config, self._mesh, self._say = config, mesh, say
        self._models, self._optimizer, self._run = models, optimizer, run
        self._saved, self._lease = saved, lease
        self._buffer = HostBuffer(config.speed.host_limit)
        self._pending: _Pending | None = None
        self.longest = 0.0
        """Seconds of the longest save from begin to end."""
        if config.speed.async_save and priority.settable():
            problem = priority.refusal(*self._priorities)
            if problem is not None:
                raise UserError(
                    f"--async-ckpt-cpu-priority {self._priorities[0]}, "
                    f"--async-ckpt-io-priority {self._priorities[1]}: {problem}"
                )

    @property
    def _priorities(self) -> tuple[int, int]:
        speed = self._config.speed
        return speed.async_ckpt_cpu_priority, speed.async_ckpt_io_priority

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
        if self._config.speed.async_save and not last:
            self._begin(state)
            return
        saved = saving.save_checkpoint(
            self._config,
            self._mesh,
            self._models,
            self._optimizer,
            state,
            self._run,
            self._say,
            self._lease,
        )
        self._ended(saved, state, last)

    def recover(self, state: TrainState) -> None:
        """Save ``state`` at once where recovery checkpoints are; raises as `save` does.

        The save that is under way ends first: it holds an older state, and whatever is published
        last counts as the newest.
        """
        self.finish()
        saved = save_recovery(
            self._config,
            self._mesh,
            self._models,
            self._optimizer,
            state,
            self._run,
            self._say,
            self._lease,
        )
        self._ended(saved, state, last=False)

    def look(self) -> None:
        """Publish the save that is under way if all ranks have written; else do nothing.

        Raises:
            SaveFailed: it failed, and --exit-on-failed-save.
        """
        if self._pending is not None and self._pending.save.written(self._mesh.device):
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
            saving.move_tracker(save.final.parent, iteration, self._mesh)
        except SaveError as error:
            seconds = time.monotonic() - pending.begun
            saved = saving.failed(self._config, iteration, error, seconds, self._say)
        else:
            now = time.monotonic()
            saved = Saved(
                save.final,
                None,
                now - pending.begun,
                index.bytes if index is not None else 0,
                pending.stall + now - begin,
            )
            saving.conclude(self._config, iteration, saved, index, self._say)
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
            self._say(f"WARNING: the save that was under way was not finished: {error}")
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self._say(
                f"WARNING: ending the save that was under way failed: {type(error).__name__}: "
                f"{error}; what is in {pending.save.final.parent} is found at the next start"
            )

    def _end(self, pending: _Pending, *, alike: bool) -> None:
        if not alike and self._mesh.world.size > 1:
            pending.save.abandon()
            return
        index = pending.save.rescue(PATIENCE)
        if index is not None:
            catalog.write_tracker(pending.save.final.parent, pending.state.iteration)
            self._say(f"iteration {pending.state.iteration}, whose save was under way, is saved")
            self._saved(pending.save.final, pending.state)

    def _begin(self, state: TrainState) -> None:
        begun = time.monotonic()
        final = saving.announced(self._config, state, self._say)
        try:
            saving.clear(final.parent, self._mesh, self._say, self._lease)
            save = BackgroundSave(
                saving.contents(self._config, self._mesh, self._models, self._optimizer),
                final,
                saving.facts(self._config, self._mesh, self._optimizer, state, self._run),
                self._mesh.world,
                self._buffer,
                self._lower if priority.settable() else None,
                saving.check_of(self._lease),
            )
        except SaveError as error:
            seconds = time.monotonic() - begun
            saved = saving.failed(self._config, state.iteration, error, seconds, self._say)
            self._ended(saved, state, last=False)
            return
        stall = time.monotonic() - begun
        self._say("  training goes on; the checkpoint is written meanwhile")
        self._pending = _Pending(save, copy.deepcopy(state), begun, stall)

    def _lower(self) -> None:
        priority.lower_thread(*self._priorities)

    def _ended(self, saved: Saved, state: TrainState, last: bool) -> None:
        self.longest = max(self.longest, saved.seconds)
        if saved.folder is not None:
            self._saved(saved.folder, state)
        elif last or self._config.exit_on_failed_save:
            raise SaveFailed(f"iteration {state.iteration} was not saved: {saved.error}")
