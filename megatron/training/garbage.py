"""Python's garbage collector under `--manual-gc`: it runs where all ranks pause anyway.

Left to itself the collector pauses each rank at another moment, and every rank waits for every
other; collected together, the pauses coincide.
"""

import gc

from megatron.training.loop_config import TrainingConfig


class Garbage:
    """Collects at fixed iterations, or leaves the collector to itself."""

    def __init__(self, config: TrainingConfig) -> None:
        self._manual = config.manual_gc
        self._interval = config.manual_gc_interval
        self._around_evaluation = config.manual_gc and config.manual_gc_eval

    def start(self) -> None:
        """Take over from Python's own schedule."""
        if self._manual:
            gc.disable()
            gc.collect()

    def iteration(self, iteration: int) -> None:
        """Collect when this iteration's turn has come."""
        if self._manual and self._interval and iteration % self._interval == 0:
            gc.collect()

    def evaluation(self) -> None:
        """Collect around an evaluation."""
        if self._around_evaluation:
            gc.collect()

    def stop(self) -> None:
        """Give Python its schedule back."""
        if self._manual:
            gc.enable()
