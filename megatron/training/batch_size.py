"""Batch-size ramp-up: the global batch as a pure function of the samples consumed.

A `BatchSizes` is a list of steps, each holding from a number of consumed samples on. Iterations and
samples map to each other exactly, by walking the steps with integer arithmetic: so a schedule given
in iterations holds in iterations although the batch grows, and a resume needs only the samples.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.utils import UserError

_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class BatchSizes:
    """Global batch sizes, each from a threshold of consumed samples on."""

    thresholds: tuple[int, ...]
    """Consumed samples from which a size holds; ascending, the first is 0."""
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.thresholds[0] == 0 and len(self.thresholds) == len(self.sizes), self
        assert list(self.thresholds) == sorted(set(self.thresholds)), self
        assert min(self.sizes) > 0, self

    @classmethod
    def constant(cls, size: int) -> "BatchSizes":
        """Return the schedule of a batch that never changes."""
        return cls((0,), (size,))

    @property
    def is_constant(self) -> bool:
        """Return whether there is one size only."""
        return len(self.sizes) == 1

    @property
    def final(self) -> int:
        """Return the last size."""
        return self.sizes[-1]

    def at(self, consumed_samples: int) -> int:
        """Return the global batch size of the iteration that starts after ``consumed_samples``."""
        return self.sizes[bisect_right(self.thresholds, consumed_samples) - 1]

    def runs(self) -> Iterator[tuple[int, int, int, int | None]]:
        """Yield (first iteration, samples before it, size, iterations) of each size used.

        Iterations count from 0; the last run has no end (None). A size whose range is jumped over
        by one big batch is left out.
        """
        iteration = consumed = 0
        for index, size in enumerate(self.sizes):
            if index + 1 == len(self.sizes):
                yield iteration, consumed, size, None
                return
            # The size holds while an iteration starts below the next threshold.
            count = max(0, -(-(self.thresholds[index + 1] - consumed) // size))
            if count:
                yield iteration, consumed, size, count
            iteration += count
            consumed += count * size

    def samples(self, iterations: int) -> int:
        """Return the samples that the first ``iterations`` iterations consume."""
        for first, consumed, size, count in self.runs():
            if count is None or iterations <= first + count:
                return consumed + (iterations - first) * size
        raise AssertionError("the last run has no end")

    def iterations(self, samples: int) -> int:
        """Return the full iterations that ``samples`` samples are enough for."""
        for first, consumed, size, count in self.runs():
            if count is None or samples < consumed + count * size:
                return first + (samples - consumed) // size
        raise AssertionError("the last run has no end")


def parse_steps(text: str) -> list[tuple[int, int]]:
    """Return (threshold, size) pairs of ``0:768 250B:1536``, thresholds as written times suffix.

    Raises:
        UserError: the text has another form, or thresholds do not ascend from 0.
    """
    steps = []
    for part in text.replace(",", " ").split():
        threshold, colon, size = part.partition(":")
        if not colon or not size.isdigit() or int(size) < 1:
            raise UserError(
                f"--step-batch-size-schedule: {part!r} is not THRESHOLD:SIZE, as in 250B:1536"
            )
        steps.append((_count(threshold, part), int(size)))
    thresholds = [threshold for threshold, _ in steps]
    if not steps or thresholds[0] != 0 or thresholds != sorted(set(thresholds)):
        raise UserError(
            f"--step-batch-size-schedule {text!r}: thresholds must ascend and start at 0"
        )
    return steps


def _count(text: str, part: str) -> int:
    scale = _SUFFIXES.get(text[-1:].upper(), 1)
    digits = text[:-1] if scale > 1 else text
    try:
        value = float(digits) * scale
    except ValueError:
        value = -1
    if value < 0 or not value.is_integer():
        raise UserError(
            f"--step-batch-size-schedule: {text!r} in {part!r} is no number of tokens; "
            "write digits with K, M, B or T"
        )
    return int(value)


def steps_in_samples(text: str, seq_length: int) -> BatchSizes:
    """Return the schedule of ``--step-batch-size-schedule``, whose thresholds are tokens."""
    thresholds, sizes = [], []
    for tokens, size in parse_steps(text):
        # A size holds from the first sample that starts at or after its number of tokens.
        thresholds.append(-(-tokens // seq_length))
        sizes.append(size)
    if len(set(thresholds)) < len(thresholds):
        raise UserError(
            f"--step-batch-size-schedule {text!r}: two thresholds fall into one sample of "
            f"--seq-length ({seq_length}) tokens; thresholds are tokens"
        )
    return BatchSizes(tuple(thresholds), tuple(sizes))


def ramp(start: int, increment: int, samples: int, final: int) -> BatchSizes:
    """Return the schedule of ``--rampup-batch-size START INCREMENT SAMPLES``.

    The ramp's samples are shared equally by its ``(final - start) / increment`` increments; the
    k-th one holds for iterations that start with at least k shares consumed, in exact fractions.
    """
    count, rest = divmod(final - start, increment)
    assert rest == 0 and count >= 0, f"{start} + n x {increment} never is {final}"
    if count == 0 or samples == 0:
        return BatchSizes.constant(final)
    schedule: dict[int, int] = {}
    for step in range(count + 1):
        schedule[-(-step * samples // count)] = start + step * increment
    return BatchSizes(tuple(schedule), tuple(schedule.values()))


def round_down(sizes: BatchSizes, multiple: int) -> BatchSizes:
    """Return the schedule with each size rounded down to a multiple, at least the multiple."""
    rounded = tuple(max(multiple, size // multiple * multiple) for size in sizes.sizes)
    return BatchSizes(sizes.thresholds, rounded)
