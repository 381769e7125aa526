"""What stops a run that has gone wrong: losses that are not finite or jump.

The check runs where the iteration's totals are known to all ranks, so all of them decide alike. A
bad iteration never reaches the weights. By default it ends the run with exit code 1 and says where
it was seen and which samples it had; `--skip-non-finite-iterations N` skips up to N in a row
instead.
"""

from collections import deque

from megatron.training.failing.failure import RunFailed
from megatron.training.log_config import HealthConfig

SPIKE_FACTOR = 10.0
SPIKE_WINDOW = 100
SPIKE_MINIMUM = 10
"""Losses that must have been seen before a spike can be told from the start of a run."""


class Health:
    """Judges each iteration, and remembers what it needs for that."""

    def __init__(self, config: HealthConfig) -> None:
        self.checks = config.check_for_nan_in_loss_and_grad
        self.limit = config.skip_non_finite_iterations
        self.consecutive = 0
        """Iterations in a row that were not finite."""
        self._losses: deque[float] | None = (
            deque(maxlen=SPIKE_WINDOW) if config.check_for_spiky_loss else None
        )

    def non_finite(self, what: str, iteration: int, samples: range) -> None:
        """Count an iteration that was not finite; its update has been left out.

        Args:
            what: such as ``loss is nan on rank 3``.
            iteration: number of the iteration, from 1.
            samples: numbers of the samples it had.

        Raises:
            RunFailed: checks are on, and skipping is off or has reached its limit.
        """
        self.consecutive += 1
        if not self.checks or (self.limit and self.consecutive <= self.limit):
            return
        advice = (
            f"--skip-non-finite-iterations ({self.limit}) is used up by {self.consecutive} in a row"
            if self.limit
            else "--skip-non-finite-iterations N skips up to N in a row, "
            "--no-check-for-nan-in-loss-and-grad does not stop, and --iterations-to-skip "
            f"{iteration} leaves this iteration's data out"
        )
        raise RunFailed(f"iteration {iteration}: {what}; {described(samples)}. {advice}")

    def check_spike(self, loss: float, iteration: int, samples: range) -> None:
        """Look at a finite loss before its gradients reach the weights.

        Raises:
            RunFailed: the loss is a spike and those are looked for.
        """
        if self._losses is None:
            return
        if len(self._losses) >= SPIKE_MINIMUM and loss > SPIKE_FACTOR * max(self._losses):
            raise RunFailed(
                f"iteration {iteration}: loss {loss:.6g} is more than {SPIKE_FACTOR:g} times the "
                f"largest of the last {len(self._losses)} ({max(self._losses):.6g}); "
                f"{described(samples)}. Drop --check-for-spiky-loss to go on, or leave the "
                f"iteration out with --iterations-to-skip {iteration}"
            )

    def finite(self, loss: float) -> None:
        """Count an iteration whose loss and gradients were finite; it has been trained on."""
        self.consecutive = 0
        if self._losses is not None:
            self._losses.append(loss)


def described(samples: range) -> str:
    """Return a range of sample numbers for a message."""
    return f"samples {samples.start} to {samples.stop - 1} of the training set"
