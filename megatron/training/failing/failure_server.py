"""The place where the ranks of a run hear of each other's end: a thread of rank 0.

Every rank keeps one connection to it, tells what it is at every second or so, and tells of its
failure. The hub decides what the first cause is, tells everybody, and sees to it that the cause is
printed first and that all have printed before the first process is gone (torchrun kills the others
then). What is a cause:

    failed     a rank said so
    died       its connection closed without a farewell, as the system does for a killed process
    stalled    a timed step took too long somewhere. Then most ranks wait: to blame is the one that
               does not wait for others, or has not moved for longest
    absent     it never connected, although all ranks are expected from the start

An error of communication is only held for a moment, since what it is due to may be under way.

Messages are JSON objects, one a line:

    to the hub      hello, beat, failed, printed, shown, bye
    from the hub    beat, cause, show, end, over
"""

import json
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.training.failing.cause import (
    DIED,
    Beat,
    Cause,
    Kind,
    Message,
    culprit,
    is_frozen,
    last_sign,
    named,
)
from megatron.training.failing.failure import Failure
from megatron.training.failing.heartbeat import Pulse

PATIENCE = 5.0
"""Seconds for which an error of communication waits for its cause, and printing for all ranks."""
CONNECTING = 60.0
"""Seconds in which a rank must reach this place."""
FAREWELL = 2.0
"""Seconds that ended ranks have to close their connections."""
_TICK = 0.2
_FIRST_WORDS = 4096
"""Bytes that are read of a stranger's message."""


class Link:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        connection.settimeout(PATIENCE)
        # A machine that went down says nothing: the system asks it, not its busy processes.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._lock = threading.Lock()
        self._rest = b""
        self.longest: float = float("inf")
        """Bytes of an unfinished message that are put up with."""

    def send(self, what: str, **content: Any) -> None:
        """Send a message; to an end that is gone, nothing: receiving notices that."""
        data = json.dumps({"type": what, **content}).encode() + b"\n"
        with self._lock:
            try:
                self.socket.sendall(data)
            except OSError:
                pass

    def receive(self) -> list[Message] | None:
        """Return what has come, None once the other end is gone."""
        try:
            data = self.socket.recv(1 << 16)
        except OSError:
            return None
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > self.longest:
            return None
        try:
            return [json.loads(line) for line in lines]
        except (ValueError, RecursionError):  # a stranger: ports are scanned
            return None


@dataclass
class _Member:
    link: Link
    beat: Beat = field(default_factory=Beat)
    has_left: bool = False
    has_shown: bool = False


class Hub(threading.Thread):
    """Listens to all ranks of a run; see the top of this file.

    Args:
        interval: seconds between two beats of a rank.
        pulse: of rank 0, whose last step all ranks must know if it dies.
    """

    def __init__(self, interval: float, pulse: Pulse) -> None:
        super().__init__(name="hub", daemon=True)
        self.interval, self._pulse = interval, pulse
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, dualstack_ipv6=both)
        self.port: int = self._listener.getsockname()[1]
        self.token = secrets.token_hex(16)
        """What a rank must say to be listened to: anybody can find the port."""
        self.finished = threading.Event()
        """Nothing is left to do here: rank 0 may go."""
        self._places: Sequence[str] = ()
        self._absent: set[int] = set()
        """Ranks that have not connected yet."""
        self._absent_until = float("inf")
        self._members: dict[int, _Member] = {}
        self._ranks: dict[Link, int] = {}
        self._strangers: set[Link] = set()
        self._held: dict[int, tuple[str, Failure]] = {}
        self._held_until = self._show_at = self._end_at = self._finish_at = float("inf")
        self._cause: Cause | None = None
        self._is_printed = False
        self._over = False
        self._next_beat = 0.0

    def open(self, places: Sequence[str]) -> None:
        """Begin to listen, given the coordinates of every rank."""
        self._places, self._absent = places, set(range(len(places)))
        # One that gives up to connect can say so itself before.
        self._absent_until = time.monotonic() + CONNECTING + 2 * PATIENCE
        self.start()

    def close(self) -> None:
        """Tell all ranks that the run is over and that nothing is to be watched any more."""
        self._over = True
        self.join(timeout=2 * PATIENCE)

    def forget(self) -> None:
        """Close what a forked child has inherited, so that the death of this process is seen."""
        self._listener.close()
        for link in [*self._strangers, *(member.link for member in self._members.values())]:
            link.socket.close()

    def run(self) -> None:
        """Serve until the run is over or has failed."""
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._listener, selectors.EVENT_READ, None)
                last = time.monotonic()
                while not self.finished.is_set():
                    for key, _ in selector.select(_TICK):
                        self._serve(key, selector)
                    now = time.monotonic()
                    if now - last > self.interval:  # this process was stopped, the others as well
                        self._absent_until += now - last
                        for member in self._members.values():
                            member.beat.heard += now - last
                    self._tick(now)
                    last = now
        finally:  # should this fail, nobody must believe to be watched
            self.forget()

    def _serve(self, key: selectors.SelectorKey, selector: selectors.BaseSelector) -> None:
        """Take what a connection has brought."""
        if key.data is None:
            self._accept(selector)
            return
        messages = key.data.receive()
        for message in messages or ():
            self._take(key.data, message)
        if messages is None:
            selector.unregister(key.fileobj)
            self._closed(key.data)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            connection = self._listener.accept()[0]
        except OSError:  # it is gone already, or this process has too many files open
            time.sleep(_TICK)
            return
        try:
            link = Link(connection)
        except OSError:  # gone in this moment
            connection.close()
            return
        link.longest = _FIRST_WORDS
        self._strangers.add(link)
        selector.register(link.socket, selectors.EVENT_READ, link)

    def _take(self, link: Link, message: Message) -> None:
        if link in self._strangers:
            if isinstance(message, dict) and message.get("token") == self.token:
                self._strangers.discard(link)
                rank = self._ranks[link] = message["rank"]
                self._members[rank] = _Member(link)
                self._absent.discard(rank)
                link.longest = float("inf")
            return
        rank = self._ranks[link]
        member, kind = self._members[rank], message.pop("type")
        if kind == "beat":
            member.beat = Beat(**message)
        elif kind == "failed":
            self._failed(rank, message.pop("doing"), Failure(**message))
        elif kind == "printed":
            self._show_at, self._is_printed = 0.0, True
        elif kind == "shown":
            member.has_shown = True
        elif kind == "bye":
            member.has_left = True

    def _closed(self, link: Link) -> None:
        link.socket.close()
        if link in self._strangers:
            self._strangers.discard(link)
            return
        rank = self._ranks.pop(link)
        member = self._members.pop(rank)
        if not member.has_left and self._cause is None and not self._over:
            self._died(rank, member.beat)

    def _died(self, rank: int, beat: Beat) -> None:
        """Find out why: NCCL ends a process (SIGABRT) when its collective takes too long."""
        waited = beat.age + beat.silence
        if not beat.is_waiting or waited < self._pulse.limit:
            self._decide("died", rank, f"{DIED}; {last_sign(beat)}")
            return
        limit = f"the time limit of a collective, for which it had waited {waited:.0f} s"
        others = {other: member.beat for other, member in self._members.items()}
        slow = culprit(others, self.interval) if others else rank
        if slow == rank or others[slow].is_waiting:
            self._decide("died", rank, f"died, most likely by {limit}; {last_sign(beat)}")
            return
        age = others[slow].age + others[slow].silence
        what = f"stalled: nothing new for {age:.0f} s; {last_sign(others[slow])}"
        died = f"{named(self._places, rank)} died, most likely by {limit}"
        self._decide("stalled", slow, f"{what}; {died}")

    def _failed(self, rank: int, doing: str, failure: Failure) -> None:
        if self._cause is not None:
            return
        if not failure.is_lost:
            self._decide("failed", rank, f"failed in {doing}", failure)
            return
        self._held[rank] = (doing, failure)
        self._held_until = min(self._held_until, time.monotonic() + PATIENCE)

    def _tick(self, now: float) -> None:
        if now >= self._next_beat and self._cause is None and not self._over:
            self._next_beat = now + self.interval
            self._tell("beat", doing=str(self._pulse))
        if self._over and self._finish_at == float("inf"):
            self._tell("over")
            self._finish_at = now + PATIENCE
        if self._cause is None and not self._over:
            self._look(now)
        if now >= self._show_at:
            self._show(now)
        shown = all(member.has_shown for member in self._members.values())
        if now >= self._end_at or (self._end_at < float("inf") and shown):
            self._end_at, self._finish_at = float("inf"), now + FAREWELL
            self._tell("end")
        if self._finish_at < float("inf") and (now >= self._finish_at or not self._others()):
            self.finished.set()

    def _show(self, now: float) -> None:
        """Let all ranks say where they stood; first let another rank print what one did not."""
        assert self._cause is not None
        silent = self._cause.printer
        other = min((rank for rank in self._members if rank != silent), default=silent)
        if not self._is_printed and silent == self._cause.rank != other:
            self._appoint(replace(self._cause, printer=other))
            return
        self._show_at, self._end_at = float("inf"), now + PATIENCE
        self._tell("show")

    def _others(self) -> list[int]:
        return [rank for rank in self._members if rank != 0]

    def _look(self, now: float) -> None:
        """Decide on a cause where time has passed."""
        beats = {rank: member.beat for rank, member in self._members.items()}
        limit = self._pulse.limit
        overdue = any(beat.is_overdue or beat.silence > limit for beat in beats.values())
        held = now >= self._held_until
        if self._absent and (overdue or held or now >= self._absent_until):
            self._decide("absent", min(self._absent), self._never_came())
            return
        if overdue or any(failure.is_late for _, failure in self._held.values()):
            rank = culprit(beats, self.interval)
            if overdue or not beats[rank].is_waiting:
                age = beats[rank].age + beats[rank].silence
                what = f"stalled: nothing new for {age:.0f} s"
                self._decide("stalled", rank, f"{what}; {last_sign(beats[rank])}")
                return
        if held:
            rank, (doing, failure) = next(iter(self._held.items()))
            self._decide("failed", rank, f"failed in {doing}", failure)

    def _never_came(self) -> str:
        """Return what is known of the first rank that is absent."""
        missing = f" (of {len(self._absent)} such ranks)" if len(self._absent) > 1 else ""
        return f"never came{missing}: it died, or cannot reach rank 0's port {self.port}"

    def _decide(self, kind: Kind, rank: int, what: str, failure: Failure | None = None) -> None:
        member = self._members.get(rank)
        printer = rank
        if member is None or (kind == "stalled" and is_frozen(member.beat, self.interval)):
            printer = min((other for other in self._members if other != rank), default=rank)
        title = f"{named(self._places, rank)} {what}"
        self._appoint(
            Cause(
                kind=kind,
                rank=rank,
                printer=printer,
                title=title,
                failure=failure,
                when=time.time(),
            )
        )

    def _appoint(self, cause: Cause) -> None:
        """Tell the cause to all; its printer answers when it has printed it."""
        self._cause, self._show_at = cause, time.monotonic() + PATIENCE
        self._tell("cause", **cause.to_json())

    def _tell(self, what: str, **content: Any) -> None:
        for member in self._members.values():
            member.link.send(what, **content)
