"""Two functions that take turns: while one waits for other ranks, the other computes.

    ahead        | compute | start a collective | - - - - - - - - - | wait, compute | ...
    behind       | - - - - - - - - - - - - - -  | compute, start    | - - - - - - - | ...

Each half runs in a thread of its own, but exactly one of them runs at any time: a half goes on
until it gives its turn away (`give`), which it does after it started something that takes its time
and before it waits for that. So what runs when follows from what the halves do alone, equal on all
ranks that do alike, and their collectives are called in one order.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


class Ended(Exception):
    """The other half failed, so that this one need not go on; nobody sees it outside."""


class _Pair:
    """Whose turn it is: half 0 or half 1."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._turn = 0
        self._over = [False, False]
        self._threads = [threading.get_ident()] * 2
        self.error: BaseException | None = None
        """Of the half that failed first."""

    @property
    def thread(self) -> int:
        """Return whose turn it is: the half's thread."""
        return self._threads[self._turn]

    def give(self) -> None:
        """Let the other half go on until this one has the turn again."""
        with self._changed:
            me = self._turn
            if not self._over[1 - me]:
                self._turn = 1 - me
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._turn == me)
            if self.error is not None:
                raise Ended

    def half(self, number: int, function: Callable[[], None]) -> None:
        """Run a half in the calling thread, from its first turn on; keep what it raises."""
        self._threads[number] = threading.get_ident()
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._turn == number)
            if self.error is None:
                function()
        except Ended:
            pass
        except BaseException as error:  # whatever it is, the other half must not wait for ever
            self.error = self.error or error
        finally:
            with self._changed:
                self._over[number] = True
                self._turn = 1 - number
                self._changed.notify_all()


# Of the process, not of a thread: on CUDA a half that is a backward goes on in autograd's threads.
_running: list[_Pair] = []


def give() -> None:
    """Let the other half of the pair that runs go on until it gives the turn back, or ends.

    Nothing where no pair runs, or the other half has ended. To be called by the half whose turn it
    is, from any thread that works for it.
    """
    if _running:
        _running[-1].give()


def at_work() -> int | None:
    """Return the thread of the half that has the turn, None where no pair runs.

    May be asked from any thread: who looks for what a process is at finds the caller's thread
    waiting for its turn.
    """
    pairs = _running[-1:]
    return pairs[0].thread if pairs else None


class Turns:
    """Runs pairs of functions.

    Args:
        prepare: called once in the thread of the halves that begin, such as to choose a device.
    """

    def __init__(self, prepare: Callable[[], None] = lambda: None) -> None:
        # One thread for all pairs: libraries keep threads of their own for each that calls them.
        self._thread = ThreadPoolExecutor(1, "half", prepare)

    def run(self, ahead: Callable[[], None], behind: Callable[[], None]) -> None:
        """Return when both halves have ended.

        What a half raises ends the other one where it gives its turn away, and is raised here.

        Args:
            ahead: has the first turn; runs in a thread of its own, whose gradient mode, hooks and
                other things that torch keeps for each thread are not the caller's.
            behind: runs in the calling thread.
        """
        assert not _running, "a half of a pair is no pair"
        pair = _Pair()
        _running.append(pair)
        try:
            other = self._thread.submit(pair.half, 0, ahead)
            pair.half(1, behind)
            other.result()
        finally:
            _running.remove(pair)
        if pair.error is not None:
            raise pair.error
