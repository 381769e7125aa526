"""Wall-clock timers of the phases of an iteration.

A timer has a level; those above `--timing-log-level` cost nothing and are not shown. On CUDA a
measured phase is closed by a synchronisation, so levels above 0 slow a run a little, as they do
elsewhere. Times are summed over the log interval and shown per iteration.

Level 1: the phases of an iteration. Level 2: parts of phases. At level 0 nothing is measured here.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from megatron.core import comm
from megatron.core.mesh import Axis

NAME_WIDTH = 48


class Timers:
    """Named sums of seconds."""

    def __init__(self, level: int, synchronize: Callable[[], None] = lambda: None) -> None:
        self.level = level
        self._synchronize = synchronize
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str, level: int = 1) -> Iterator[None]:
        """Add the duration of the block to timer ``name``."""
        if level > self.level:
            yield
            return
        self._synchronize()
        start = time.perf_counter()
        try:
            yield
        finally:
            self._synchronize()
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Return the sums and start again from zero."""
        seconds, self.seconds = self.seconds, {}
        return seconds


def across_ranks(seconds: dict[str, float], world: Axis) -> dict[str, list[float]]:
    """Return every rank's seconds per timer, for timers that any rank has (absent counts as 0).

    A collective over ``world``.
    """
    by_rank = comm.gather_objects(seconds, world)
    names = list(dict.fromkeys(name for one in by_rank for name in one))
    return {name: [one.get(name, 0.0) for one in by_rank] for name in names}


def timers_block(by_rank: dict[str, list[float]], style: str, iterations: int) -> str:
    """Return the block of timer lines, in milliseconds per iteration; empty if no time passed.

    Args:
        by_rank: seconds of every rank per timer.
        style: ``max``, ``minmax`` or ``all``, as `--timing-log-option` says.
        iterations: how many the sums cover.
    """
    title = {"max": "max time", "minmax": "(min, max) time", "all": "times"}[style]
    lines = [f"{title} across ranks (ms):"]
    shown = {name: values for name, values in by_rank.items() if max(values) > 0}
    if not shown:
        return ""
    for name, values in shown.items():
        ms = [1e3 * value / iterations for value in values]
        label = f"    {(name + ' ').ljust(NAME_WIDTH, '.')}:"
        if style == "max":
            lines.append(f"{label} {max(ms):.2f}")
        elif style == "minmax":
            lines.append(f"{label} ({min(ms):.2f}, {max(ms):.2f})")
        else:
            lines.append(f"  {name}:")
            lines += [f"     rank {rank:2d}: {value:.2f}" for rank, value in enumerate(ms) if value]
    return "\n".join(lines)


def synchronizer(device: torch.device) -> Callable[[], None]:
    """Return what waits until ``device`` has done all that was asked of it."""
    if device.type != "cuda":
        return lambda: None

    def synchronize() -> None:
        with comm.waiting("the device, with what others send it"):
            torch.cuda.synchronize(device)

    return synchronize
