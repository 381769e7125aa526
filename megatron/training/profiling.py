"""Profiles of a few iterations: torch's profiler, Nsight ranges, the allocator's history.

`Profiler.before` and `Profiler.after` stand around each iteration. With `--use-pytorch-profiler`
the trace goes to `--tensorboard-dir` (or to `--save`, or here); without it, on CUDA, the range is
marked for `nsys profile --capture-range=cudaProfilerApi`.
"""

from pathlib import Path
from typing import Any

import torch

from megatron.core.utils import UserError
from megatron.training.log_config import ProfilingConfig


class Profiler:
    """Profiles one range of iterations on the ranks that were asked for."""

    def __init__(
        self, config: ProfilingConfig, rank: int, device: torch.device, directory: str
    ) -> None:
        ranks = config.profile_ranks or (0,)
        self._config = config
        self._on = config.profile and rank in ranks
        self._cuda = device.type == "cuda"
        self._history = config.record_memory_history and rank in ranks
        self._target = Path(directory) / f"trace_rank{rank}.json"
        self._torch: Any = None
        self._capturing = False
        if config.profile and not config.use_pytorch_profiler and not self._cuda:
            raise UserError(
                "--profile marks iterations for Nsight Systems, which needs CUDA; add "
                "--use-pytorch-profiler for a profile on the CPU"
            )
        if self._history and not self._cuda:
            raise UserError(
                "--record-memory-history records CUDA's allocator; there is no CUDA: leave it out, "
                "or use --log-memory-interval"
            )
        if self._history:
            torch.cuda.memory._record_memory_history(max_entries=100_000)

    def before(self, iteration: int) -> None:
        """Start where the range starts; ``iteration`` (from 1) is about to run."""
        if not self._on or iteration != self._config.profile_step_start:
            return
        if self._config.use_pytorch_profiler:
            self._torch = torch.profiler.profile(record_shapes=True, profile_memory=True)
            self._torch.start()
        else:
            torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart())
        self._capturing = True

    def after(self, iteration: int) -> str | None:
        """Stop where the range ends; return what was written, if anything was."""
        if self._capturing and iteration >= self._config.profile_step_end - 1:
            return self.stop()
        return None

    def stop(self) -> str | None:
        """End a range that is open; return what was written."""
        if not self._capturing:
            return None
        self._capturing = False
        if self._torch is None:
            torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStop())
            return None
        self._torch.stop()
        self._target.parent.mkdir(parents=True, exist_ok=True)
        self._torch.export_chrome_trace(str(self._target))
        self._torch = None
        return f"profile written to {self._target}"

    def snapshot(self) -> None:
        """Write the allocator's history so far; called at the log interval."""
        if self._history:
            torch.cuda.memory._dump_snapshot(self._config.memory_snapshot_path)
