"""In what memory of its machine a process's tensors lie: in large pages, and kept when freed.

Linux gives memory in pages of 4 KiB unless it is asked for pages of 2 MiB. A training step frees
and takes hundreds of megabytes: each 4 KiB of them costs a fault, and products look up 512 times as
many addresses. torch asks for large pages, for each tensor of at least 2 MiB, if a variable says so
when its first tensor is made.

The GNU C library hands the end of its heap back to the system when more than 64 MiB of it are free,
as they are after each step, and the system clears them before it gives them again.
`keep_freed_memory` has them stay with the process, which needs them at the next step.
"""

import ctypes
import platform
from collections.abc import Mapping, MutableMapping

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""Read by torch's allocator for the CPU (c10/core/impl/alloc_cpu.cpp)."""


def ask_for_huge_pages(environ: MutableMapping[str, str]) -> None:
    """Ask for large pages unless the environment says 0 or 1 itself; before torch is imported."""
    environ.setdefault(HUGE_PAGES, "1")


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""What mallopt(3) calls them."""
MOST_KEPT = 2**31 - 1
"""Bytes at the end of the heap that stay with the process; a C int holds no more."""
LARGEST_OF_HEAP = 2**25
"""Bytes of the largest piece that comes from the heap: as the library settles it, once such a piece
was freed, unless it is told something about the heap. Larger ones always come from the system."""
SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_")
TUNABLES = "GLIBC_TUNABLES"
"""Variables by which a user settles the same, the last one as ``glibc.malloc.NAME=VALUE:...``."""


def keep_freed_memory(environ: Mapping[str, str]) -> bool:
    """Keep what tensors leave for the next ones, unless the environment settles it; say whether.

    What a process holds stays at its peak. Only the GNU C library is told; others do as they do.
    """
    settled = "glibc.malloc" in environ.get(TUNABLES, "") or any(map(environ.get, SETTINGS))
    if settled or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = ((M_TRIM_THRESHOLD, MOST_KEPT), (M_MMAP_THRESHOLD, LARGEST_OF_HEAP))
    return all([mallopt(name, value) for name, value in settings])
