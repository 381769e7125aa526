"""How checkpoints are written and read: what takes time, and whose."""

from megatron.core.config import Config, check_at_least, option
from megatron.core.utils import UserError

GIB = 2**30


class SpeedConfig(Config):
    """Who writes and reads a checkpoint, and what waits for it; none of it changes the content."""

    async_save: bool = option(False)
    """Save while training goes on: copies of what is saved are made in host memory, and written in
    the background."""

    async_save_host_gib: float | None = option(None, metavar="GIB")
    """Host memory that a rank may take for copies of --async-save; what does not fit is written
    before training goes on. Without a limit: as much as the rank writes."""

    async_ckpt_cpu_priority: int = option(10)
    """Niceness of the threads that write in the background, 0 (as training) to 19."""

    async_ckpt_io_priority: int = option(3, choices=(0, 1, 2, 3))
    """I/O class of these threads, as Linux numbers them: 0 none, 1 realtime (needs rights), 2 best
    effort, 3 idle."""

    ckpt_fully_parallel_save: bool = option(True)
    """Let replicas share the bytes that they hold alike; off, the first one writes them all."""

    def __post_init__(self) -> None:
        limit = self.async_save_host_gib
        if limit is not None and not limit >= 0:
            raise UserError(f"--async-save-host-gib ({limit}) must not be negative")
        check_at_least(self, 0, "async_ckpt_cpu_priority")
        if self.async_ckpt_cpu_priority > 19:
            raise UserError(
                f"--async-ckpt-cpu-priority ({self.async_ckpt_cpu_priority}) must be at most 19, "
                "the least that Linux gives"
            )

    @property
    def host_limit(self) -> int | None:
        """Return the bytes that copies may take; None for no limit."""
        return None if self.async_save_host_gib is None else int(self.async_save_host_gib * GIB)
