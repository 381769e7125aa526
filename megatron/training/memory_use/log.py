"""Memory by category in a run, beside what was planned: ``--log-memory-interval``.

Weights, gradients, masters and optimizer states are the bytes of the buffers there are, and equal
the plan to the byte; a difference of more than a twentieth is warned of, since it is a fault of the
plan or of the buffers. What is there for communication is counted as it comes and goes
(`core/held`), at most since the start; activations as autograd saves them (`core/saved_tensors`),
at most in the iteration that is reported. The rest is known to CUDA's allocator alone: its peak
stands beside the plan's total. On the CPU there is the resident memory of the process, interpreter
and libraries included, which nobody plans.
"""

from collections.abc import Iterator, Mapping

from megatron.core import comm
from megatron.core.utils import Say
from megatron.training import memory
from megatron.training.memory_use.use import MemoryUse
from megatron.training.plan.memory import RankMemory
from megatron.training.records.metrics import Metrics

TOLERATED = 0.05
"""Share of the planned bytes by which exact categories may differ before it is warned of."""
PEAK = "allocator's peak"


class MemoryLog:
    """Reports what the ranks hold, and what was planned.

    Args:
        use: what this one holds.
        metrics: takes the numbers.
        say: takes warnings.
    """

    def __init__(self, use: MemoryUse, metrics: Metrics, say: Say) -> None:
        self._use, self._metrics, self._say = use, metrics, say
        self._is_cuda = use.mesh.device.type == "cuda"
        self._warned = False

    def report(self, iteration: int) -> None:
        """Print and write every category; a collective of the world."""
        mesh = self._use.mesh
        everyone = comm.gather_objects((mesh.pp.coordinate, self._held()), mesh.world)
        for rank, planned in enumerate(self._use.planned):
            there = [found for place, found in everyone if place == rank]
            most = {name: max(found[name] for found in there) for name in there[0]}
            self._metrics.memory(iteration, rank, most, self._planned(planned))
            self._warn(rank, most, planned.fixed)

    def _held(self) -> dict[str, int]:
        """Return the bytes that this process holds, or has held at most, by category."""
        found = self._use.fixed()
        if self._use.activations is not None:
            found["activations"] = self._use.activations
        if not self._use.config.shared_by_torch:  # nobody knows what torch has of whole units
            found["communication"] = self._use.passing.most
        if self._use.saver is not None and self._use.config.checkpoint.speed.async_save:
            found["staged"] = self._use.saver.bytes
        name = PEAK if self._is_cuda else "resident"
        return {**found, name: memory.in_use(self._use.mesh.device)()}

    def _planned(self, planned: RankMemory) -> dict[str, int]:
        return planned.categories() | ({PEAK: planned.total} if self._is_cuda else {})

    def _warn(self, rank: int, measured: Mapping[str, int], planned: Mapping[str, int]) -> None:
        differing = [*differences(measured, planned)]
        if differing and not self._warned:
            self._warned = True
            self._say(
                f"warning: the memory of pipeline rank {rank} is not what was planned: "
                f"{', '.join(differing)}; this is a fault of the plan, please report it"
            )


def differences(measured: Mapping[str, int], planned: Mapping[str, int]) -> Iterator[str]:
    """Yield the categories whose bytes differ by more than is tolerated, with both numbers."""
    for name, size in planned.items():
        if abs(measured[name] - size) > TOLERATED * size:
            yield f"{name} {measured[name]:,} bytes, planned {size:,}"
