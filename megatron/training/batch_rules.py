"""Rules of batches: how they grow, and that replicas can share them."""

from megatron.core.utils import UserError
from megatron.training.config import RunConfig
from megatron.training.layout_rules import Origins, Rule
from megatron.training.wording import listed, nearest_multiples, nearest_of

MOST_INCREMENTS = 100_000
"""Of a batch size that grows."""


def ramp_up_reaches_the_batch(config: RunConfig, origins: Origins) -> None:
    """START + n x INCREMENT is the global batch, and each of these is made of microbatches."""
    training = config.training
    if training.rampup_batch_size is None:
        return
    if training.step_batch_size_schedule is not None:
        raise UserError(
            "--rampup-batch-size and --step-batch-size-schedule exclude each other; drop one"
        )
    start, increment, samples = training.rampup_batch_size
    final, name = (
        training.global_batch_size,
        f"--rampup-batch-size {listed(training.rampup_batch_size, ' ')}",
    )
    if start < 1 or increment < 1 or samples < 0:
        raise UserError(f"{name}: START and INCREMENT must be at least 1, SAMPLES at least 0")
    if start > final or (final - start) % increment:
        below = max(start, start + (final - start) // increment * increment)
        reached = (below, below + increment * (below < final))
        raise UserError(
            f"{name}: steps of {increment} from {start} do not reach --global-batch-size "
            f"({final}); try --global-batch-size {nearest_of(reached, final)}"
        )
    if (final - start) // increment > MOST_INCREMENTS:
        raise UserError(
            f"{name}: {(final - start) // increment} increments to --global-batch-size ({final}); "
            f"there may be at most {MOST_INCREMENTS:,}, so raise INCREMENT"
        )
    unit = config.samples_per_pass
    if not training.decrease_batch_size_if_needed and (start % unit or increment % unit):
        raise UserError(
            f"{name}: START and INCREMENT must be divisible by {_unit_text(config)}; try START "
            f"{nearest_multiples(start, unit)} and INCREMENT {nearest_multiples(increment, unit)}, "
            "or --decrease-batch-size-if-needed"
        )


def batch_divides(config: RunConfig, origins: Origins) -> None:
    """The global batch is a whole number of microbatches on every replica."""
    training, unit = config.training, config.samples_per_pass
    size = training.global_batch_size
    if training.step_batch_size_schedule is not None or training.decrease_batch_size_if_needed:
        if size < unit and training.step_batch_size_schedule is None:
            raise UserError(
                f"--global-batch-size ({size}) is less than {_unit_text(config)}; it cannot be "
                "decreased to a multiple of that"
            )
        return
    if size % unit:
        raise UserError(
            f"--global-batch-size ({size}) is not divisible by {_unit_text(config)}; try "
            f"{nearest_multiples(size, unit)}, or --decrease-batch-size-if-needed"
        )


def batch_steps_divide(config: RunConfig, origins: Origins) -> None:
    """Each size of --step-batch-size-schedule is made of microbatches."""
    training = config.training
    if training.step_batch_size_schedule is None:
        return
    sizes = config.batch_sizes
    for size in sizes.sizes:
        if size % config.samples_per_pass:
            raise UserError(
                f"--step-batch-size-schedule: size {size} is not divisible by "
                f"{_unit_text(config)}; try {nearest_multiples(size, config.samples_per_pass)}"
            )
    if origins["global_batch_size"] in ("flag", "file") and (
        training.global_batch_size != sizes.final
    ):
        raise UserError(
            f"--global-batch-size ({training.global_batch_size}) contradicts the last size of "
            f"--step-batch-size-schedule ({sizes.final}); drop --global-batch-size"
        )
    if training.decrease_batch_size_if_needed:
        raise UserError(
            "--step-batch-size-schedule and --decrease-batch-size-if-needed exclude each other; "
            "drop one"
        )


def _unit_text(config: RunConfig) -> str:
    micro, replicas = config.training.micro_batch_size, config.data_parallel_size
    return f"{micro * replicas} = --micro-batch-size ({micro}) x data-parallel size ({replicas})"


BATCH_RULES: tuple[Rule, ...] = (ramp_up_reaches_the_batch, batch_divides, batch_steps_divide)
