"""What rank 0 finds out, known to all: files, input and decisions that must be one."""

import time
from collections.abc import Callable
from typing import NoReturn, TypeVar

from megatron.core import comm
from megatron.core.mesh import Axis
from megatron.core.utils import PeerError, UserError

T = TypeVar("T")
WORD = 30.0
"""Seconds after which those who wait for long work hear of it; collectives may take far more."""
_GOES_ON, _IS_OVER = "goes on", "is over"


def from_first(world: Axis, action: Callable[[], T]) -> T:
    """Return on every rank what ``action`` gives on the first; a collective of ``world``.

    What the action raises is raised at once, so that nobody waits: a `UserError` by every rank, any
    other as it is by the first.

    Raises:
        PeerError: the action raised something that is no `UserError`; by all ranks but the first.
    """
    found: T | None = None
    problem: Exception | None = None
    if world.coordinate == 0:
        try:
            found = action()
        except Exception as error:
            problem = error
    known = problem
    if problem is not None and not isinstance(problem, UserError):
        # Not itself: there are exceptions that cannot be pickled.
        known = PeerError(f"rank {world.ranks[0]} failed: {type(problem).__name__}: {problem}")
    result, raised = comm.broadcast_object((found, known), world)
    if world.coordinate == 0 and problem is not None:
        raise problem
    if raised is not None:
        raise raised
    answer: T = result
    return answer


def from_first_at_length(world: Axis, action: Callable[[Callable[[], None]], T]) -> T:
    """As `from_first`, for what may take longer than others may wait in a collective.

    The action gets a function to call now and then, which lets the others know that it goes on.
    """
    if world.coordinate > 0:
        while comm.broadcast_object(None, world) == _GOES_ON:
            pass
        return from_first(world, _never)
    told = time.monotonic()

    def goes_on() -> None:
        nonlocal told
        if time.monotonic() - told >= WORD:
            comm.broadcast_object(_GOES_ON, world)
            told = time.monotonic()

    def act() -> T:
        try:
            return action(goes_on)
        finally:
            comm.broadcast_object(_IS_OVER, world)

    return from_first(world, act)


def _never() -> NoReturn:
    raise AssertionError("only the first rank acts")
