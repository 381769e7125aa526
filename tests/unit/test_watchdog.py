"""What rank 0 makes of what the ranks say, and of those that say nothing any more."""

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megatron.core import comm
from megatron.core.utils import UserError
from megatron.training.failing.cause import Beat, culprit
from megatron.training.failing.failure import RunFailed, describe, leave
from megatron.training.failing.failure_server import Hub, Link
from megatron.training.failing.heartbeat import Pulse
from megatron.training.failing.watchdog import _check_connected, is_waiting

INTERVAL = 0.2
PLACES = ["[dp0]", "[dp1]", "[dp2]"]


class Rank:
    """A process that is connected, as a test plays it."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.link = Link(socket.create_connection(("localhost", hub.port)))
        self.link.socket.settimeout(20)
        self.link.send("hello", rank=rank, token=hub.token)
        self.rest: list[dict[str, Any]] = []

    def beat(self, doing: str = "iteration 7", age: float = 0.0, **rest: bool) -> None:
        facts = {"is_waiting": False, "is_overdue": False, **rest}
        self.link.send("beat", doing=doing, age=age, **facts)

    def fail(self, error: Exception, **rest: bool) -> None:
        self.link.send("failed", doing="iteration 7", **describe(error).to_json() | rest)

    def get(self, kind: str) -> dict[str, Any]:
        """Return the next message of a kind."""
        end = time.monotonic() + 20
        while time.monotonic() < end:
            while self.rest:
                message = self.rest.pop(0)
                if message["type"] == kind:
                    return message
            received = self.link.receive()
            assert received is not None, f"closed before {kind}"
            self.rest += received
        raise AssertionError(f"no {kind}")

    def vanish(self) -> None:
        self.link.socket.close()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr("megatron.training.failing.failure_server.PATIENCE", 1.5)
    hub = Hub(INTERVAL, Pulse(limit=3.0))
    hub.open(PLACES)
    yield hub
    hub.finished.set()
    hub.join()


def joined(hub: Hub, count: int = 3) -> list[Rank]:
    ranks = [Rank(hub, rank) for rank in range(count)]
    for rank in ranks:
        rank.beat()
        rank.get("beat")  # the hub knows it now
    return ranks


def test_a_failure_goes_to_all_and_comes_to_an_end_in_order(hub: Hub) -> None:
    ranks = joined(hub)
    ranks[1].fail(ValueError("planted"))
    for rank in ranks:
        cause = rank.get("cause")
        assert (cause["rank"], cause["printer"]) == (1, 1)
        assert cause["title"] == "[dp1] rank 1 failed in iteration 7"
        assert cause["failure"]["message"] == "ValueError: planted"
    ranks[2].fail(KeyError("later"))  # no second cause
    assert not any(rank.rest for rank in ranks), "nobody may go on before the cause is printed"
    ranks[1].link.send("printed")
    for rank in ranks:
        rank.get("show")
    for rank in ranks[:2]:
        rank.link.send("shown")
    started = time.monotonic()
    ranks[2].link.send("shown")
    for rank in ranks:
        rank.get("end")
    assert time.monotonic() - started < 3
    for rank in ranks[1:]:
        rank.vanish()
    assert hub.finished.wait(5)


def test_an_error_of_communication_waits_for_the_death_it_is_due_to(hub: Hub) -> None:
    ranks = joined(hub)
    ranks[2].beat("iteration 7, last action forward(microbatch 3, chunk 0)")
    ranks[0].fail(RuntimeError("connection closed by peer"), is_lost=True)
    time.sleep(0.7)
    ranks[2].vanish()
    cause = ranks[0].get("cause")
    assert (cause["kind"], cause["rank"], cause["printer"]) == ("died", 2, 0)
    assert cause["title"].startswith("[dp2] rank 2 died without a word")
    assert cause["title"].endswith("s ago: iteration 7, last action forward(microbatch 3, chunk 0)")


def test_an_error_of_communication_without_another_is_the_cause(hub: Hub) -> None:
    ranks = joined(hub)
    ranks[0].fail(RuntimeError("network unreachable"), is_lost=True)
    cause = ranks[1].get("cause")
    assert cause["rank"] == 0 and "unreachable" in cause["failure"]["message"]


def test_a_farewell_is_no_death(hub: Hub) -> None:
    ranks = joined(hub)
    ranks[1].link.send("bye")
    ranks[1].vanish()
    time.sleep(2 * INTERVAL)
    assert ranks[0].get("beat")  # life goes on
    ranks[0].fail(ValueError("planted"))
    assert ranks[2].get("cause")["rank"] == 0


def test_a_good_end_is_told(hub: Hub) -> None:
    ranks = joined(hub)
    ranks[0].link.send("bye")
    ranks[0].vanish()
    hub._over = True  # what `close` says before it waits
    for rank in ranks[1:]:
        rank.get("over")
        rank.vanish()
    hub.close()
    assert hub.finished.is_set()


def test_strangers_change_nothing(hub: Hub) -> None:
    for text in (b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"type": "hello", "rank": 1}\n', b""):
        with socket.create_connection(("localhost", hub.port)) as stranger:
            stranger.sendall(text)
            time.sleep(0.05)
    ranks = joined(hub)
    ranks[1].fail(ValueError("planted"))
    assert ranks[2].get("cause")["rank"] == 1


def test_a_step_that_takes_too_long_is_a_stall_of_who_does_not_wait(hub: Hub) -> None:
    ranks = joined(hub)
    ranks[1].beat(age=4.0)
    ranks[2].beat(age=4.5, is_waiting=True)
    time.sleep(0.1)
    ranks[0].beat(age=5.0, is_waiting=True, is_overdue=True)
    cause = ranks[0].get("cause")
    assert cause["kind"] == "stalled" and cause["rank"] == 1
    assert cause["title"].startswith("[dp1] rank 1 stalled: nothing new for 4 s; last heartbeat")


def test_a_rank_that_does_not_print_is_replaced(hub: Hub) -> None:
    ranks = joined(hub)
    ranks[1].fail(ValueError("planted"))
    assert ranks[0].get("cause")["printer"] == 1
    again = ranks[0].get("cause")
    assert again["printer"] == 0 and again["title"].startswith("[dp1] rank 1 failed")


@pytest.mark.parametrize(
    ("beats", "expected"),
    [
        # (age, waits) of each rank
        ([(9.0, True), (8.0, False), (9.5, True)], 1),
        ([(9.0, True), (8.0, True), (9.5, True)], 2),
        ([(1.0, False), (8.0, False), (9.5, True)], 1),
    ],
)
def test_who_is_to_blame(beats: list[tuple[float, bool]], expected: int) -> None:
    """The one that does not wait for others; if all do, the one that moved least lately."""
    known = {rank: Beat("x", age, waits) for rank, (age, waits) in enumerate(beats)}
    assert culprit(known, INTERVAL) == expected


def test_one_that_is_silent_cannot_say_that_it_waits() -> None:
    silent = Beat("x", 0.0, is_waiting=True)
    silent.heard -= 60
    assert culprit({0: Beat("x", 50.0, is_waiting=True), 1: silent}, INTERVAL) == 1


def test_errors_are_told_apart() -> None:
    for error, code, plain in (
        (UserError("--a is wrong"), 2, True),
        (RunFailed("loss is nan"), 1, True),
        (KeyboardInterrupt(), 130, True),
        (ValueError("odd"), 1, False),
    ):
        found = describe(error)
        assert (found.code, found.is_plain, found.is_lost) == (code, plain, False)
    assert describe(UserError("--a is wrong")).line == "error: --a is wrong"
    assert describe(KeyboardInterrupt()).line == "interrupted"


def test_a_pulse_tells_its_last_step() -> None:
    pulse = Pulse()
    first = pulse.step
    pulse.timed("iteration 3")
    assert pulse.is_timed and str(pulse) == "iteration 3"
    pulse.action("forward(microbatch 1, chunk 0)")
    assert str(pulse) == "iteration 3, last action forward(microbatch 1, chunk 0)"
    pulse.action("forward(microbatch 1, chunk 0)")
    assert pulse.step is not first and pulse.is_timed
    pulse.untimed("saving")
    assert not pulse.is_timed and str(pulse) == "saving"


def test_a_rank_that_never_came_is_the_cause(hub: Hub) -> None:
    ranks = joined(hub, 2)
    hub._absent_until = 0.0
    cause = ranks[0].get("cause")
    assert (cause["kind"], cause["rank"], cause["printer"]) == ("absent", 2, 0)
    assert cause["title"].startswith("[dp2] rank 2 never came: it died, or cannot reach rank 0's")


def test_an_error_of_communication_is_due_to_the_rank_that_never_came(hub: Hub) -> None:
    ranks = joined(hub, 2)
    ranks[1].fail(RuntimeError("connection closed by peer"), is_lost=True)
    cause = ranks[0].get("cause")
    assert (cause["kind"], cause["rank"]) == ("absent", 2)
    assert cause["title"].startswith("[dp2] rank 2 never came: it died, or cannot reach rank 0's")


@pytest.mark.parametrize(("waits", "kind", "to_blame"), [(False, "stalled", 0), (True, "died", 1)])
def test_a_death_after_a_long_wait_is_the_time_limit_of_a_collective(
    hub: Hub, waits: bool, kind: str, to_blame: int
) -> None:
    """NCCL ends a process so; who does not wait for others is to blame, not who was ended."""
    ranks = joined(hub)
    for rank in ranks:  # longer than the limit of 3 s, in a phase that is not timed
        rank.beat("saving iteration 7", age=5.0, is_waiting=waits or rank is not ranks[0])
    time.sleep(0.3)
    ranks[1].vanish()
    cause = ranks[2].get("cause")
    assert (cause["kind"], cause["rank"]) == (kind, to_blame)
    assert (
        "died, most likely by the time limit of a collective, for which it had waited 5 s"
        in (cause["title"])
    )
    assert "died without a word" not in cause["title"]


def test_the_problems_of_connecting_are_one_message() -> None:
    _check_connected(["", ""])
    with pytest.raises(UserError, match=r"^\[dp1\] rank 1 cannot .* \(and 1 other ranks\); the"):
        _check_connected(["", "[dp1] rank 1 cannot reach rank 0", "[dp2] rank 2 cannot"])


class _Refusing:
    """A listener with a connection that is gone, or without file descriptors."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener, self.left = listener, 2

    def accept(self) -> Any:
        self.left -= 1
        if self.left >= 0:
            raise OSError(24, "Too many open files")
        return self._listener.accept()

    def fileno(self) -> int:
        return self._listener.fileno()

    def close(self) -> None:
        self._listener.close()


def test_a_failed_accept_changes_nothing(hub: Hub) -> None:
    refusing: Any = _Refusing(hub._listener)
    hub._listener = refusing
    ranks = joined(hub)
    assert refusing.left < 0
    ranks[1].fail(ValueError("planted"))
    assert ranks[2].get("cause")["rank"] == 1


@pytest.mark.parametrize("text", [b"[" * 4000 + b"]" * 4000 + b"\n", b"x" * 5000])
def test_a_stranger_that_talks_too_much_is_sent_away(hub: Hub, text: bytes) -> None:
    with socket.create_connection(("localhost", hub.port)) as stranger:
        stranger.settimeout(10)
        stranger.sendall(text)
        try:
            assert stranger.recv(1) == b""
        except ConnectionResetError:
            pass
    ranks = joined(hub)
    assert all(rank.get("beat") for rank in ranks)


class _Ended(BaseException):
    pass


class _Stream:
    def __init__(self, flush: Callable[[], None]) -> None:
        self.flush = flush


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    "flush",
    [
        lambda: _raise(BrokenPipeError()),
        lambda: _raise(ValueError("I/O operation on closed file")),
        lambda: threading.Event().wait(30),
    ],
    ids=["closed pipe", "closed file", "locked"],
)
def test_a_process_leaves_whatever_becomes_of_its_output(
    flush: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", _Stream(flush))
    monkeypatch.setattr("os._exit", lambda code: _raise(_Ended(code)))
    start = time.monotonic()
    with pytest.raises(_Ended) as ended:
        leave(7)
    assert ended.value.args == (7,)
    assert time.monotonic() - start < 10


def test_a_mark_says_that_a_process_waits() -> None:
    """On NCCL it waits where it reads a result, in a frame that no collective stands in."""
    frame = sys._getframe()
    assert not is_waiting(frame)
    with comm.waiting("the gradient's norm"):
        assert is_waiting(frame) and comm.awaited() == "the gradient's norm"
    assert not is_waiting(frame) and comm.awaited() is None


def test_an_exit_of_the_programs_own_is_a_failure() -> None:
    assert describe(SystemExit(3)).code == 3
    found = describe(SystemExit("no disk"))
    assert (found.code, found.message, found.is_plain) == (1, "SystemExit: no disk", False)
