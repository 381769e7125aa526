"""When one rank fails, all end, and the first cause is what is shown first.

Every rank of a run with several processes has a watchdog, a thread that is connected to the `Hub`
of rank 0. It tells every second or so what the main thread is at (`Pulse`), and ends the process
when the hub says that some rank has failed, died or stalled: first the cause is printed, by the
rank itself where it can, then every rank prints where it stood. Main threads wait meanwhile in
collectives that will never end; so the process is left without ceremony.

The hub is silent when rank 0 is stopped or its machine freezes, which closes no connection. Then
every other rank ends by itself, once it has heard nothing for the limit of a timed step.

Time in which the whole process is stopped (a suspended job) does not count: the watchdog, which is
stopped too, measures it.
"""

import math
import os
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from megatron.core import comm, turns
from megatron.core.mesh import Axis
from megatron.core.utils import UserError
from megatron.training.failing.cause import DIED, Cause, Kind, Message, named
from megatron.training.failing.failure import (
    Failure,
    describe,
    is_communication,
    leave,
    write_error_file,
)
from megatron.training.failing.failure_server import CONNECTING, FAREWELL, PATIENCE, Hub, Link
from megatron.training.failing.heartbeat import Pulse

INTERVAL = 1.0
"""Seconds between two beats."""
BEATS_PER_SECOND = 200
"""Beats that the hub shall have to read: with more ranks each is heard less often."""
ALIKE = 0.5
"""Seconds by which rank 0 is before the others with an error that all ranks may have."""


@contextmanager
def watching(
    world: Axis, where: str, host: str, pulse: Pulse, program: str
) -> Iterator["Watchdog | None"]:
    """Watch while the block runs; what it raises ends the process, with a word to the others.

    A collective of the world. One process needs no watchdog, and an error of its block goes on. The
    arguments are those of `start`.
    """
    watchdog = start(world, where, host, pulse, program)
    try:
        yield watchdog
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        is_good = isinstance(error, SystemExit) and not error.code
        if watchdog is not None and not is_good:
            watchdog.fail(error)
        raise
    finally:
        if watchdog is not None:
            watchdog.stop()


def start(world: Axis, where: str, host: str, pulse: Pulse, program: str) -> "Watchdog | None":
    """Start to watch; a collective of the world. One process needs no watchdog.

    Args:
        world: all ranks.
        where: this rank's coordinates, as `grid.place` writes them.
        host: of rank 0.
        pulse: what this process is at.
        program: its name, for messages.

    Raises:
        UserError: some rank cannot reach rank 0; every rank raises, or ends here.
    """
    if world.size == 1:
        return None
    rank = world.coordinate
    interval = max(INTERVAL, world.size / BEATS_PER_SECOND)
    hub = Hub(interval, pulse) if rank == 0 else None
    meeting = (hub.port, hub.token) if hub else None
    gathered = comm.gather_objects((where, meeting), world)
    places = [place for place, _ in gathered]
    port, token = next(found for _, found in gathered if found is not None)
    if hub is not None:
        hub.open(places)
        host = "localhost"
    watchdog, problem = None, ""
    try:
        link = Link(socket.create_connection((host, port), timeout=CONNECTING))
    except OSError as error:
        problem = f"{named(places, rank)} cannot reach rank 0 at {host}:{port}: {error}"
    else:
        link.send("hello", rank=rank, token=token)
        watchdog = Watchdog(link, rank, places, pulse, program=program, interval=interval, hub=hub)
        watchdog.start()
    try:
        # All hear of it here; of one that dies before, the hub tells those that are connected.
        _check_connected(comm.gather_objects(problem, world))
    except BaseException as error:
        if watchdog is not None:
            watchdog.fail(error)
        raise
    return watchdog


def _check_connected(problems: Sequence[str]) -> None:
    """Refuse a run of which some rank cannot tell the others how it fares.

    Raises:
        UserError: with the first of the problems; an empty one is none.
    """
    found = [problem for problem in problems if problem]
    if found:
        more = f" (and {len(found) - 1} other ranks)" if found[1:] else ""
        raise UserError(
            f"{found[0]}{more}; the machines of a run must let each other in on every port above "
            "1023, and MASTER_ADDR must name rank 0's by an address that all of them can reach"
        )


class Watchdog(threading.Thread):
    """Watches one process; see the top of this file.

    Args:
        link: to the hub of rank 0, which has been told this process's rank.
        rank: of this process.
        places: where each rank runs, for messages.
        pulse: what the main thread is at.
        program: its name, for messages.
        interval: seconds between two beats.
        hub: of this process; None on ranks other than 0.
    """

    on_failure: Callable[[str, int], None] | None = None
    """Told of the cause and the exit code before the process ends, in the watchdog's thread."""

    def __init__(
        self,
        link: Link,
        rank: int,
        places: list[str],
        pulse: Pulse,
        *,
        program: str,
        interval: float,
        hub: Hub | None,
    ) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._link, self._rank, self._places, self._pulse = link, rank, places, pulse
        self._program, self._interval, self._hub = program, interval, hub
        self._main = threading.main_thread().ident
        self._leaving = False
        self._failure: Failure | None = None
        """This process's own."""
        self._has_failed = threading.Event()
        self._cause: Cause | None = None
        self._rank_0 = "starting"
        """What rank 0 was at."""
        self._step: object = None
        self._age = 0.0
        self._silence = 0.0
        """Seconds since the hub has said something."""
        os.register_at_fork(after_in_child=self._forget)

    def fail(self, error: BaseException) -> None:
        """Tell all ranks of this one's error and end the process, when all have printed.

        Returns only if nobody is watching any more, since rank 0 has come to a good end.
        """
        failure = describe(error)
        if failure.is_plain and self._rank != 0:
            time.sleep(ALIKE)
        self._failure = failure
        self._has_failed.set()
        self._link.send("failed", doing=str(self._pulse), **failure.to_json())
        self.join()

    def stop(self) -> None:
        """Watch no longer: this process comes to a good end."""
        self._link.send("bye")
        if self._hub is not None:
            self._hub.close()
        self._farewell()
        self.join(timeout=PATIENCE)

    def run(self) -> None:
        """Watch until the end of the run or of the process."""
        last, next_beat, deadline = time.monotonic(), 0.0, math.inf
        with selectors.DefaultSelector() as selector:
            selector.register(self._link.socket, selectors.EVENT_READ)
            while True:
                messages = self._link.receive() if selector.select(self._interval) else []
                if messages is None:
                    break
                for message in messages:
                    self._take(message)
                now = time.monotonic()
                # As long as a loop takes at most: time in which nothing runs does not count.
                passed = min(now - last, 2 * self._interval)
                self._grow_older(passed)
                self._silence = 0.0 if messages else self._silence + passed
                last = now
                if now >= next_beat:
                    next_beat = now + self._interval
                    self._beat()
                if self._cause is not None:
                    deadline = min(deadline, now + 4 * PATIENCE)
                if now >= deadline:
                    self._end()
                # Once there is a cause, the hub beats no longer and the deadline holds.
                waits = self._cause is None and not self._leaving
                if waits and self._silence > self._pulse.limit:
                    silent = f"stalled: nothing heard of it for {self._silence:.0f} s"
                    self._lost("stalled", f"{silent}; it is stopped, or its machine is frozen")
        if not self._leaving:
            self._lost("died", DIED)
        self._link.socket.close()

    def _farewell(self) -> None:
        """Say that nothing more will be said; the hub closes the connection then."""
        self._leaving = True
        try:
            self._link.socket.shutdown(socket.SHUT_WR)
        except OSError:  # closed already
            pass

    def _forget(self) -> None:
        """Close what a forked child has inherited, so that the death of its parent is seen."""
        self._link.socket.close()
        if self._hub is not None:
            self._hub.forget()

    def _grow_older(self, seconds: float) -> None:
        step = self._pulse.step
        self._age = self._age + seconds if step is self._step else 0.0
        self._step = step

    def _beat(self) -> None:
        overdue = self._pulse.is_timed and self._age > self._pulse.limit
        self._link.send(
            "beat",
            doing=str(self._pulse),
            age=self._age,
            is_waiting=is_waiting(self._frame_at_work()),
            is_overdue=overdue,
        )

    def _frame_at_work(self) -> FrameType | None:
        assert self._main is not None
        return sys._current_frames().get(turns.at_work() or self._main)

    def _take(self, message: Message) -> None:
        kind = message.pop("type")
        if kind == "beat":
            self._rank_0 = message["doing"]
        elif kind == "cause":
            self._cause = Cause.from_json(message)
            if self._rank == self._cause.printer:
                self._print_cause(self._cause)
                self._link.send("printed")
        elif kind == "show" and self._cause is not None:
            told = self._rank == self._cause.printer == self._cause.rank
            if not self._cause.is_plain and not told:
                self._print(self._own_block(self._cause.title))
            self._note(self._cause)
            self._link.send("shown")
        elif kind == "end":
            self._end()
        elif kind == "over":
            self._farewell()

    def _print_cause(self, cause: Cause) -> None:
        if cause.is_plain:
            where = f"{self._places[self._rank]} " if self._rank != 0 else ""
            assert cause.failure is not None
            self._print(f"{self._program}: {where}{cause.failure.line}")
        elif cause.failure is not None:
            self._print(f"{cause.title}:\n{cause.failure.stack}")
        elif cause.rank == self._rank:
            self._print(f"{cause.title}; it is at:\n{self._stack()}")
        else:
            self._print(cause.title)

    def _own_block(self, cause: str) -> str:
        me = named(self._places, self._rank)
        if not is_waiting(self._frame_at_work()):
            # Perhaps its collective has failed, and the main thread is on its way to say so.
            self._has_failed.wait(ALIKE)
        if self._failure is not None:
            return f"{me} ends, since {cause}; it failed then:\n{self._failure.stack}"
        awaited = comm.awaited()
        wait = f", waiting for {awaited}" if awaited else ""
        return f"{me} ends, since {cause}; it was in {self._pulse}{wait}, at:\n{self._stack()}"

    def _stack(self) -> str:
        frame = self._frame_at_work()
        return "".join(traceback.format_stack(frame)) if frame is not None else "(no stack)\n"

    def _print(self, text: str) -> None:
        try:
            # In one piece, so that the blocks of several ranks do not mix.
            sys.stderr.write(text.rstrip("\n") + "\n")
            sys.stderr.flush()
        except OSError:  # nobody reads any more; the process must end all the same
            pass

    def _note(self, cause: Cause) -> None:
        """Leave the cause where schedulers and launchers look for it."""
        message, stack = cause.title, ""
        if cause.failure is not None:
            text, stack = cause.failure.message, cause.failure.stack
            message = text if cause.is_plain else f"{cause.title}: {text}"
        try:
            # torchrun shows the earliest: that of the rank that is to blame.
            write_error_file(message, stack, cause.when + (self._rank != cause.rank))
            if self.on_failure is not None:
                self.on_failure(message, cause.code)
        except OSError as error:  # a full disk, say, must not keep the process from ending
            self._print(f"{named(self._places, self._rank)} could not note its end: {error}")

    def _lost(self, kind: Kind, what: str) -> None:
        """End: rank 0 is gone or does not answer, and with it the hub."""
        if self._cause is not None:
            self._end()
        cause = Cause(
            kind=kind,
            rank=0,
            printer=min(1, len(self._places) - 1),
            title=f"{named(self._places, 0)} {what}; last heartbeat: {self._rank_0}",
            failure=None,
            when=time.time(),
        )
        self._cause = cause
        if self._rank == cause.printer:
            self._print_cause(cause)
        else:
            time.sleep(ALIKE)
        self._print(self._own_block(cause.title))
        self._note(cause)
        self._end()

    def _end(self) -> None:
        cause = self._cause
        assert cause is not None
        if self._rank != cause.rank:
            # torchrun takes the first process that ends for the one that failed.
            time.sleep(ALIKE)
        self._farewell()
        if self._hub is not None:
            self._hub.finished.wait(2 * FAREWELL)
        leave(cause.code)


def is_waiting(frame: FrameType | None) -> bool:
    """Return whether the thread at work, whose stack this is, waits for other ranks."""
    if comm.awaited() is not None:
        return True
    while frame is not None:
        if is_communication(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False
