"""The loop: batches, length of the run, what ends it early, and validation."""

import signal
from collections.abc import Mapping
from typing import Any, Literal

from megatron.core.config import Config, check_at_least, check_at_most, option
from megatron.core.utils import UserError
from megatron.training.batch_size import parse_steps

LARGEST_SEED = 2**32 - 1
"""What every random generator takes, numpy's too."""


MOST_EVALUATED = 10_000_000
"""Batches of an evaluation: the order of all of them is held in memory."""


def parse_signal(text: str) -> int:
    """Return the number of a signal given by number (``15``) or name (``SIGTERM``, ``TERM``)."""
    name = text.strip().upper()
    try:
        found = signal.Signals(int(name)) if name.isdigit() else signal.Signals[_signal(name)]
    except (KeyError, ValueError):
        raise ValueError(f"--exit-signal takes a signal's name or number, not {text!r}") from None
    if found in (signal.SIGKILL, signal.SIGSTOP):
        raise ValueError(f"--exit-signal {text}: no process can handle {found.name}; try SIGTERM")
    return int(found)


def _signal(name: str) -> str:
    return name if name.startswith("SIG") else f"SIG{name}"


def parse_duration(text: str) -> int | Literal["auto"]:
    """Return minutes, or ``auto``."""
    if text == "auto":
        return "auto"
    try:
        return int(text.replace("_", ""))
    except ValueError:
        raise ValueError(f"--exit-duration-in-mins takes minutes or 'auto', not {text!r}") from None


class TrainingConfig(Config):
    """Batches, length of the run, and how it ends."""

    micro_batch_size: int = option()
    """Samples in one forward and backward pass of a replica."""

    global_batch_size: int = option(derived="--micro-batch-size x data-parallel size")
    """Samples in one optimizer step, over all replicas and microbatches."""

    rampup_batch_size: tuple[int, int, int] | None = option(None, metavar="START INCREMENT SAMPLES")
    """Grow the global batch from START by INCREMENTs while the first SAMPLES are consumed."""

    step_batch_size_schedule: str | None = option(None, metavar="'0:SIZE TOKENS:SIZE ...'")
    """Global batch size by consumed tokens, such as ``0:768 250B:1536``; suffixes K, M, B, T."""

    decrease_batch_size_if_needed: bool = option(False)
    """Round the global batch down to what the replicas divide, instead of refusing it."""

    train_iters: int | None = option(None)
    """Length of the run in iterations (optimizer steps)."""

    train_samples: int | None = option(None)
    """Length of the run in samples; give this or --train-iters."""

    skip_train: bool = option(False)
    """Evaluate only."""

    seed: int = option(1234)
    """Seed of initial values, dropout and data order."""

    deterministic_mode: bool = option(False)
    """Use only kernels whose results are the same bit for bit in every run."""

    calculate_per_token_loss: bool = option(True)
    """Average the loss over all valid tokens of the global batch; off, average the means of the
    microbatches."""

    iterations_to_skip: tuple[int, ...] = option((), metavar="ITERATION")
    """Iterations whose data is consumed without training on it."""

    exit_interval: int | None = option(None)
    """Save and stop at the first iteration that this number divides."""

    exit_duration_in_mins: int | Literal["auto"] | None = option(
        None, parse=parse_duration, metavar="MINUTES|auto"
    )
    """Save and stop after this wall time; ``auto`` is Slurm's end time less the time of a save."""

    exit_signal_handler: bool = option(False)
    """Save and stop cleanly when the exit signal arrives."""

    exit_signal: int = option(int(signal.SIGTERM), parse=parse_signal, metavar="SIGNAL")
    """The signal that --exit-signal-handler waits for, by name or number."""

    exit_code_on_early_stop: int = option(0)
    """Exit code of a run that stopped cleanly before its end, for schedulers that resubmit."""

    manual_gc: bool = option(False)
    """Collect Python's garbage at fixed iterations only, so that ranks pause together."""

    manual_gc_interval: int = option(0)
    """Iterations between collections under --manual-gc; 0 never collects during training."""

    manual_gc_eval: bool = option(True, aliases={"--disable-manual-gc-eval": False})
    """Under --manual-gc, collect at the start and end of an evaluation too."""

    empty_unused_memory_level: int = option(0, choices=(0, 1, 2))
    """Give memory that torch's allocator holds and nobody uses back to the device: 1 after
    backwards and evaluations, 2 after the optimizer too; on CUDA."""

    @classmethod
    def derive(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Let the global batch be one microbatch per replica, or the last of a given schedule."""
        replica = (
            values["tensor_model_parallel_size"]
            * values["pipeline_model_parallel_size"]
            * values["context_parallel_size"]
        )
        replicas = max(1, values["world_size"] // max(1, replica))
        size = (values["micro_batch_size"] or 1) * replicas
        schedule = values["step_batch_size_schedule"]
        if schedule:
            size = parse_steps(schedule)[-1][1]
        return {"global_batch_size": size}

    def __post_init__(self) -> None:
        check_at_least(self, 1, "micro_batch_size", "global_batch_size", "exit_interval")
        check_at_least(self, 0, "train_iters", "train_samples", "manual_gc_interval")
        if not 0 <= self.seed <= LARGEST_SEED:
            raise UserError(f"--seed ({self.seed}) must be 0 to {LARGEST_SEED}")
        if self.exit_duration_in_mins != "auto":
            check_at_least(self, 1, "exit_duration_in_mins")
        if not 0 <= self.exit_code_on_early_stop <= 255:
            raise UserError(
                f"--exit-code-on-early-stop ({self.exit_code_on_early_stop}) must be 0 to 255"
            )


class ValidationConfig(Config):
    """When to evaluate, and on how much."""

    eval_iters: int = option(100)
    """Batches of one evaluation; 0 never evaluates, -1 takes the whole validation set."""

    eval_interval: int | None = option(None)
    """Iterations between evaluations; when absent, only the end of the run is evaluated."""

    start_eval_at_iter: int | None = option(None)
    """First iteration after which the periodic evaluations begin."""

    def __post_init__(self) -> None:
        if self.eval_iters < -1:
            raise UserError(
                f"--eval-iters ({self.eval_iters}) must be a number of batches, 0 for none or -1 "
                "for the whole validation set"
            )
        check_at_most(self, MOST_EVALUATED, "eval_iters")
        if self.eval_interval is not None and self.eval_interval < 1:
            raise UserError(
                f"--eval-interval ({self.eval_interval}) must be at least 1; "
                "--eval-iters 0 turns evaluation off"
            )
