"""A run that finds no memory ends with one message: what was held, and what would need less.

By then there is little memory left, so everything that the failed work held is given up before the
message is made. What is planned is in `plan/memory`, what would lower it in `plan/savings`.
"""

import errno
import gc
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron.core.utils import human_bytes
from megatron.training import memory
from megatron.training.failing.failure import RunFailed
from megatron.training.failing.heartbeat import Pulse
from megatron.training.memory_use.use import MemoryUse
from megatron.training.plan.savings import Savings

_OF_THE_CPU = ("DefaultCPUAllocator", "bad_alloc", "Cannot allocate memory")
"""How torch words it in an error that has no class of its own."""
SPARE = 0.1
"""Share of the memory that a plan must leave to operations at work and to the allocator."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that there is no memory left."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OF_THE_CPU)


@contextmanager
def explained(use: MemoryUse, pulse: Pulse) -> Iterator[None]:
    """Turn an error of memory in the block into one that says what can be done.

    Args:
        use: what this process holds, and what was planned.
        pulse: what it is at.

    Raises:
        RunFailed: there was no memory left.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        where, passing = str(pulse), use.passing.now
        traceback.clear_frames(error.__traceback__)  # what was under way holds memory too
        gc.collect()
        raise RunFailed("\n".join(_lines(use, where, passing, error))) from error


def _lines(use: MemoryUse, where: str, passing: int, error: Exception) -> Iterator[str]:
    said = str(error).strip().splitlines() or [type(error).__name__]
    yield f"out of memory in {where}: {said[0]}"
    fixed = {name: size for name, size in use.fixed().items() if name != "host"}
    in_use = ", ".join(
        f"{n} {human_bytes(size)}" for n, size in memory.report(use.mesh.device).items()
    )
    yield f"  held: {_listed({**fixed, 'communication': passing})} ({in_use})"
    if use.padded_rows is None:  # nothing is planned
        return
    left, limit = memory.left(use.mesh.device)
    planned = use.planned[use.mesh.pp.coordinate]
    # What is planned has not fitted, whatever seems to be left now.
    room = (1 - SPARE) * min(left + sum(fixed.values()), planned.total)
    yield (
        f"  planned: {human_bytes(planned.total)} at the fullest moment, each at most: "
        f"{_listed(planned.categories())}; under {limit} there is room for about "
        f"{human_bytes(room)}"
    )
    if use.origins is not None:
        savings = Savings(use.config, use.origins, use.padded_rows)
        yield from (f"  {line}" for line in savings.lines(room))


def _listed(sizes: dict[str, int]) -> str:
    """Return what there is by category, the largest first."""
    there = sorted(((size, name) for name, size in sizes.items() if size), reverse=True)
    return ", ".join(f"{name} {human_bytes(size)}" for size, name in there) or "nothing"
