"""Memory in use, on CUDA by the allocator and on the CPU by the process."""

import os
from collections.abc import Callable

import torch

_PAGE = os.sysconf("SC_PAGE_SIZE")


def in_use(device: torch.device) -> Callable[[], int]:
    """Return what tells bytes in use: the allocator's peak on CUDA, resident ones on the CPU."""
    if device.type == "cuda":
        return lambda: torch.cuda.max_memory_allocated(device)
    return _resident


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


def _resident() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:  # not Linux
        return _peak_resident()


def _peak_resident() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
