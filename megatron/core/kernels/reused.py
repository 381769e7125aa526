"""Memory of the host that large results take in turns.

The C library asks the system for the memory of a large tensor each time, and the system clears each
page of it at the first touch: of the logits of a small model that takes as long as half their
product. `Reused` keeps what one result leaves for the next one of its owner.
"""

import math
import mmap
import os
import weakref
from typing import Any

import torch
from torch import Tensor

SMALLEST = 2**25
"""Bytes from which on a result is kept an eye on; smaller ones come from the process's heap."""
PAGE = 2**21
ANONYMOUS = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
"""0 on systems without either: there everything is as torch has it."""


class Reused:
    """Results of one place in a model, of which a later one lies where an earlier one lay.

    An earlier one that somebody still has, as a view or for a backward, keeps its place. So as many
    places are held as results were ever there at once, and a copy of the owner starts with none.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "Reused":
        return Reused()

    def __reduce__(self) -> tuple[Any, ...]:
        return Reused, ()

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor of the CPU with whatever numbers there are."""
        count = math.prod(shape)
        size = count * dtype.itemsize
        if size < max(SMALLEST, 1) or not ANONYMOUS:
            return torch.empty(shape, dtype=dtype)
        # What comes back when nobody has the result any more is the view alone.
        block = self._block(size)
        view = memoryview(block)
        returns = weakref.finalize(view, self._free.append, block)
        returns.atexit = False
        # Not `view`: what an autograd function returns must be nobody's view to be overwritten.
        return torch.frombuffer(view, dtype=dtype, count=count).resize_(shape)

    def _block(self, size: int) -> mmap.mmap:
        while self._free:
            block = self._free.pop()
            if len(block) >= size:
                return block
        block = mmap.mmap(-1, -(-size // PAGE) * PAGE, flags=ANONYMOUS)
        if os.environ.get("THP_MEM_ALLOC_ENABLE") == "1" and hasattr(mmap, "MADV_HUGEPAGE"):
            block.madvise(mmap.MADV_HUGEPAGE)  # as torch has its own
        return block
