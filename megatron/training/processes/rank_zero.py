"""What rank 0 finds out, known to all: files, input and decisions that must be one."""

from collections.abc import Callable
from typing import TypeVar

from megatron.core import comm
from megatron.core.mesh import Axis
from megatron.core.utils import PeerError, UserError

T = TypeVar("T")


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
