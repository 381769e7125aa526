"""What the first process finds out, known to all: files, input and decisions that must be one."""

from collections.abc import Callable
from typing import TypeVar

from megatron.core import comm
from megatron.core.mesh import Axis
from megatron.core.utils import UserError

T = TypeVar("T")


def from_first(world: Axis, action: Callable[[], T]) -> T:
    """Return on every rank what ``action`` gives on the first; a collective of ``world``.

    Raises:
        UserError: the action raised it; every rank does.
    """
    found: T | UserError | None = None
    if world.coordinate == 0:
        try:
            found = action()
        except UserError as error:
            found = error
    result: T | UserError = comm.gather_objects(found, world)[0]
    if isinstance(result, UserError):
        raise result
    return result
