"""`pretrain_gpt` in a process that may take so much memory for its model and no more.

The limit is set when the model is about to be built, so that what an interpreter, its libraries and
its connections take does not count: it is no matter of strategies.
"""

import ctypes
import os
import resource
from pathlib import Path
from typing import Any

import pretrain_gpt
from megatron.training import arguments
from megatron.training.pretrain import pretrain
from megatron.training.program import Program

LARGE = 1 << 17
"""Bytes from which malloc gives memory back to the system at once."""
STACK = 1 << 19
"""Bytes of a new thread's stack, which count as its process's data; else 8 MiB, used or not."""
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8


def main(words: list[str]) -> int:
    """Run the program under a limit, the first word, in bytes; return its exit code."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, LARGE)
    libc.mallopt(_M_ARENA_MAX, 1)
    attributes = ctypes.create_string_buffer(128)
    libc.pthread_attr_init(attributes)
    libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(STACK))
    libc.pthread_setattr_default_np(attributes)

    def build_model(*given: Any) -> Any:
        resource.setrlimit(resource.RLIMIT_DATA, (_data() + int(words[0]), before[1]))
        return pretrain_gpt.build_model(*given)

    place = pretrain_gpt.launch.discover(os.environ)
    run = arguments.parse(words[1:], "pretrain_gpt", world_size=place.world_size)
    program = Program(
        build_model=build_model,
        build_datasets=pretrain_gpt.build_datasets,
        forward_step=pretrain_gpt.forward_step,
    )
    try:
        return pretrain(run, place, program)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _data() -> int:
    """Return the bytes of this process's writable memory."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmData"))
