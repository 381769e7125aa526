"""`--log-progress`: one line in SAVE/progress.txt when a job starts and at each of its checkpoints.

The file outlives jobs, so it shows a run's throughput with all its interruptions.
"""

import os
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from megatron.training.state import TrainState


class ProgressFile:
    """Appends to the progress file of one run."""

    def __init__(
        self, save: str, world_size: int, seq_length: int, environ: Mapping[str, str] = os.environ
    ) -> None:
        self._path = Path(save) / "progress.txt"
        self._world_size, self._seq_length = world_size, seq_length
        self._job = environ.get("SLURM_JOB_ID", "")
        self._started = time.time()
        self._flops = 0.0

    def start(self, state: TrainState) -> None:
        """Note that a job takes up the run."""
        self._flops = state.flops
        self._append(f"Starting job\tIteration: {state.iteration}\t{self._amounts(state)}")

    def saved(self, state: TrainState) -> None:
        """Note a checkpoint."""
        seconds = max(time.time() - self._started, 1e-9)
        rate = (state.flops - self._flops) / seconds / self._world_size / 1e12
        self._append(
            f"Saved checkpoint\tIteration: {state.iteration}\t"
            f"Job throughput: {rate:.1f} TFLOP/s/GPU\t{self._amounts(state)}"
        )

    def _amounts(self, state: TrainState) -> str:
        tokens = state.consumed_samples * self._seq_length / 1e9
        return f"Floating-point operations: {state.flops:.2e}\tTokens (in billions): {tokens:.2f}"

    def _append(self, text: str) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(
                f"{datetime.now():%Y-%m-%d %H:%M:%S}\tJob ID: {self._job}\t"
                f"# GPUs: {self._world_size}\t{text}\n"
            )
