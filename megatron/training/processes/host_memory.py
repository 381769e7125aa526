"""In what pages a process's tensors lie in the memory of its machine.

Linux gives memory in pages of 4 KiB unless it is asked for pages of 2 MiB. A training step frees
and takes hundreds of megabytes: each 4 KiB of them costs a fault, and products look up 512 times as
many addresses. torch asks for large pages, for each tensor of at least 2 MiB, if a variable says so
when its first tensor is made.
"""

from collections.abc import MutableMapping

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""Read by torch's allocator for the CPU (c10/core/impl/alloc_cpu.cpp)."""


def ask_for_huge_pages(environ: MutableMapping[str, str]) -> None:
    """Ask for large pages unless the environment says 0 or 1 itself; before torch is imported."""
    environ.setdefault(HUGE_PAGES, "1")
