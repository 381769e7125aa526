"""Memory in use, on CUDA by the allocator and on the CPU by the process, and what is left of it."""

import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from megatron.core.utils import human_bytes

_PAGE = os.sysconf("SC_PAGE_SIZE")
_CGROUPS = Path("/sys/fs/cgroup")


def in_use(device: torch.device) -> Callable[[], int]:
    """Return what tells bytes in use: the allocator's peak on CUDA, resident ones on the CPU."""
    if device.type == "cuda":
        return lambda: torch.cuda.max_memory_allocated(device)
    return _resident


def emptying(level: int, device: torch.device) -> Callable[[int], None]:
    """Return what gives unused memory back to the device, at moments that ``level`` asks for.

    The moments are called by the least level that includes them; on the CPU there is nothing to do.
    """

    def empty(least: int) -> None:
        if level >= least and device.type == "cuda":
            torch.cuda.empty_cache()

    return empty


def report(device: torch.device) -> dict[str, float]:
    """Return bytes by name, for the line after the first iterations."""
    if device.type == "cuda":
        return {
            "allocated": torch.cuda.memory_allocated(device),
            "max allocated": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
            "max reserved": torch.cuda.max_memory_reserved(device),
        }
    return {"resident": _resident(), "max resident": _peak_resident()}


def left(device: torch.device) -> tuple[int, str]:
    """Return the bytes that tensors can still take, and the limit that they meet then."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + unused, f"the device's {human_bytes(total)}"
    return min(_limits())


def _limits() -> Iterator[tuple[int, str]]:
    """Yield the bytes that are left of every limit of this process, and its name."""
    sizes = _status()
    for kind, name, used in (
        (resource.RLIMIT_DATA, "RLIMIT_DATA", "VmData"),
        (resource.RLIMIT_AS, "RLIMIT_AS", "VmSize"),
    ):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY and used in sizes:
            yield max(0, limit - sizes[used]), f"{name} of {human_bytes(limit)}"
    for folder in _own_cgroups():
        try:
            most, now = (
                int((folder / f"memory.{name}").read_text()) for name in ("max", "current")
            )
        except (OSError, ValueError):  # another kind of machine, or "max": no limit
            continue
        yield max(0, most - now), f"the control group's {human_bytes(most)}"
    total = os.sysconf("SC_PHYS_PAGES") * _PAGE
    yield _status("/proc/meminfo").get("MemAvailable", total), f"the machine's {human_bytes(total)}"


def _own_cgroups() -> Iterator[Path]:
    """Yield this process's control group, as it is seen from inside of it and from outside."""
    yield _CGROUPS
    try:
        path = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()[-1].split(":")[2]
    except (OSError, IndexError):
        return
    yield _CGROUPS / path.strip("/")


def _status(path: str = "/proc/self/status") -> dict[str, int]:
    """Return the sizes that the system tells, in bytes; nothing where it does not."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return {}
    words = [line.split() for line in lines if line.endswith(" kB")]
    return {name.rstrip(":"): 1024 * int(size) for name, size, _ in words}


def _resident() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:  # not Linux
        return _peak_resident()


def _peak_resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
