"""Learning rate and weight decay as pure functions of progress; nothing here imports torch.

A `Schedule` counts in the unit its lengths were given in, iterations or samples, and progress
carries both counts, so what is given in iterations holds in iterations while the batch size ramps
up. The optimizer stores no rate and nobody counts schedule steps: after a resume the rate follows
from the iteration, however often something was loaded.

Progress is what was done *before* the iteration, so the first iteration of a run has progress 0 and
a warm-up from 0 starts with a rate of 0, as in Megatron-LM. Shapes of the decay, with x the part of
the way from the end of the warm-up to the end of the decay (of the final fall for WSD):

    linear               1 - x
    cosine               (1 + cos(pi x)) / 2
    inverse-square-root  sqrt(warm-up / progress) of the peak, at least the minimum
    WSD                  1 until the final fall, then one of linear, cosine,
                         exponential 2 * 0.5**x - 1, minus_sqrt 1 - sqrt(x)
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from megatron.core.config import flag_of
from megatron.core.optimizer.config import ScheduleConfig
from megatron.core.optimizer.groups import Rates
from megatron.core.utils import UserError

Unit = Literal["iterations", "samples"]


class Progress(NamedTuple):
    """How far a run has come: what it has done so far."""

    iterations: int
    samples: int


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The resolved inputs of both curves; lengths and positions are in ``unit``."""

    unit: Unit
    lr: float
    min_lr: float
    init_lr: float
    warmup: int
    decay: int
    decay_style: str
    wsd_decay: int | None
    wsd_decay_style: str
    start_weight_decay: float
    end_weight_decay: float
    weight_decay_style: str
    length: int
    """Length of the run: the weight decay grows until here."""
    decoupled_lr: float | None = None
    """Peak of embedding and output head; None: that of all others."""
    decoupled_min_lr: float | None = None

    def rates(self, progress: Progress) -> Rates:
        """Return the rates and the weight decay of the iteration that starts at ``progress``."""
        return self.rates_at(getattr(progress, self.unit))

    def rates_at(self, position: int) -> Rates:
        """Return the rates and the weight decay after ``position`` units."""
        apart = self.decoupled
        return Rates(
            self.learning_rate_at(position),
            self.weight_decay_at(position),
            None if apart is None else apart.learning_rate_at(position),
        )

    @property
    def decoupled(self) -> "Schedule | None":
        """Return the schedule of embedding and output head, where they have their own."""
        if self.decoupled_lr is None or self.decoupled_min_lr is None:
            return None
        return dataclasses.replace(
            self,
            lr=self.decoupled_lr,
            min_lr=self.decoupled_min_lr,
            decoupled_lr=None,
            decoupled_min_lr=None,
        )

    def learning_rate(self, progress: Progress) -> float:
        """Return the learning rate of the iteration that starts at ``progress``."""
        return self.learning_rate_at(getattr(progress, self.unit))

    def weight_decay(self, progress: Progress) -> float:
        """Return the weight decay of the iteration that starts at ``progress``."""
        return self.weight_decay_at(getattr(progress, self.unit))

    def learning_rate_at(self, position: int) -> float:
        """Return the learning rate after ``position`` units."""
        if self.warmup > 0 and position <= self.warmup:
            return self.init_lr + (self.lr - self.init_lr) * position / self.warmup
        if self.decay_style == "constant":
            return self.lr
        if position > self.decay:
            return self.min_lr
        if self.decay_style == "inverse-square-root":
            falling = self.lr * math.sqrt(max(self.warmup, 1) / max(position, 1))
            return max(self.min_lr, falling)
        return self.min_lr + (self.lr - self.min_lr) * self._remaining(position)

    def _remaining(self, position: int) -> float:
        """Return what is left of the way from the peak to the minimum, from 1 to 0."""
        if self.decay_style == "WSD":
            assert self.wsd_decay is not None
            start = self.decay - self.wsd_decay
            if position <= start:
                return 1.0
            return _fall(self.wsd_decay_style, (position - start) / self.wsd_decay)
        return _fall(self.decay_style, (position - self.warmup) / (self.decay - self.warmup))

    def weight_decay_at(self, position: int) -> float:
        """Return the weight decay after ``position`` units."""
        start, end = self.start_weight_decay, self.end_weight_decay
        if self.weight_decay_style == "constant" or position >= self.length:
            return end
        return start + (end - start) * (1 - _fall(self.weight_decay_style, position / self.length))

    def points(self, count: int = 5) -> list[int]:
        """Return evenly spaced positions of the run, fewer than ``count`` of a short one."""
        spaced = (round(i * self.length / (count - 1)) for i in range(count))
        return list(dict.fromkeys(spaced))

    def to_json(self) -> dict[str, Any]:
        """Return the schedule as a checkpoint stores it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Schedule":
        """Return the schedule that `to_json` gave."""
        return cls(**stored)


def _fall(style: str, x: float) -> float:
    """Return a curve that falls from 1 at ``x`` = 0 to 0 at ``x`` = 1."""
    if style == "linear":
        return 1 - x
    if style == "cosine":
        return 0.5 * (math.cos(math.pi * x) + 1)
    if style == "exponential":
        return 2 * math.pow(0.5, x) - 1
    assert style == "minus_sqrt", style
    return 1 - math.sqrt(x)


def build_schedule(
    config: ScheduleConfig,
    weight_decay: float,
    *,
    train_iters: int | None = None,
    train_samples: int | None = None,
    decoupled_lr: float | None = None,
    decoupled_min_lr: float | None = None,
) -> Schedule:
    """Return the schedule of a run of ``train_iters`` iterations or ``train_samples`` samples.

    Args:
        config: curves and lengths.
        weight_decay: where it is constant.
        train_iters: length in iterations, or
        train_samples: in samples.
        decoupled_lr: peak of embedding and output head, if they have their own.
        decoupled_min_lr: and its end; absent, that of all others.

    Raises:
        UserError: --lr is absent, a length is in the unit that the run is not counted in, or the
            lengths or rates do not fit each other.
    """
    if config.lr is None:
        raise UserError("--lr is required to train; give the peak learning rate, such as --lr 3e-4")
    unit: Unit = "iterations" if train_iters is not None else "samples"
    length = train_iters if train_iters is not None else train_samples
    if length is None:
        raise UserError("the length of the run is missing; give --train-iters or --train-samples")
    decay, warmup, wsd = _lengths(config, unit, length)
    constant = config.weight_decay_incr_style == "constant"
    start = weight_decay if constant else config.start_weight_decay
    end = weight_decay if constant else config.end_weight_decay
    assert start is not None and end is not None, "ScheduleConfig requires both"
    if decoupled_lr is None:
        decoupled_min_lr = None
    else:
        decoupled_min_lr = _decoupled_end(config, decoupled_lr, decoupled_min_lr)
    return Schedule(
        unit=unit,
        lr=config.lr,
        min_lr=config.min_lr,
        init_lr=config.lr_warmup_init,
        warmup=warmup,
        decay=decay,
        decay_style=config.lr_decay_style,
        wsd_decay=wsd,
        wsd_decay_style=config.lr_wsd_decay_style,
        start_weight_decay=start,
        end_weight_decay=end,
        weight_decay_style=config.weight_decay_incr_style,
        length=max(length, 1),
        decoupled_lr=decoupled_lr,
        decoupled_min_lr=decoupled_min_lr,
    )


def _lengths(config: ScheduleConfig, unit: Unit, length: int) -> tuple[int, int, int | None]:
    """Return the lengths of decay, warm-up and the fall of a WSD schedule, checked."""
    _check_unit(config, unit)
    if unit == "iterations":
        decay, warmup, wsd = (
            config.lr_decay_iters,
            config.lr_warmup_iters,
            config.lr_wsd_decay_iters,
        )
    else:
        decay, warmup = config.lr_decay_samples, config.lr_warmup_samples
        wsd = config.lr_wsd_decay_samples
    # A run of zero iterations (evaluation only) still has a schedule, of one unit.
    decay = max(decay or length, 1)
    if config.lr_warmup_fraction is not None:
        warmup = round(config.lr_warmup_fraction * decay)
    _check_lengths(config, unit, decay=decay, warmup=warmup, wsd=wsd)
    return decay, warmup, wsd


def _decoupled_end(config: ScheduleConfig, peak: float, end: float | None) -> float:
    """Return where the rate of embedding and head ends, checked like that of all others."""
    name = "--decoupled-min-lr"
    if end is None:
        end, name = config.min_lr, "--min-lr, since there is no --decoupled-min-lr"
    if not peak >= end:
        raise UserError(f"--decoupled-lr ({peak}) must be at least where it ends ({end}: {name})")
    if not config.lr_warmup_init <= peak:
        raise UserError(
            f"--lr-warmup-init ({config.lr_warmup_init}) must be at most --decoupled-lr ({peak})"
        )
    return end


def _check_unit(config: ScheduleConfig, unit: Unit) -> None:
    """Refuse a length in samples for a run counted in iterations, and the other way round."""
    given, other, mine = ("iters", "samples", "--train-iters")
    if unit == "samples":
        given, other, mine = ("samples", "iters", "--train-samples")
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        value = getattr(config, f"{name}_{other}")
        if value:
            wrong, right = (flag_of(ScheduleConfig, f"{name}_{end}") for end in (other, given))
            raise UserError(f"{wrong} ({value}) does not go with {mine}; give {right}")


def _check_lengths(
    config: ScheduleConfig, unit: Unit, *, decay: int, warmup: int, wsd: int | None
) -> None:
    suffix = "iters" if unit == "iterations" else "samples"
    if warmup >= decay and warmup > 0:
        raise UserError(
            f"the warm-up ({warmup} {unit}) must be shorter than the decay ({decay} {unit}); lower "
            f"--lr-warmup-{suffix} or --lr-warmup-fraction, or raise --lr-decay-{suffix}"
        )
    if config.lr_decay_style == "WSD":
        if wsd is None:
            raise UserError(
                f"--lr-decay-style WSD needs --lr-wsd-decay-{suffix}, the length of its final fall"
            )
        if not 0 <= wsd <= decay:  # 0 stays at the peak to the end
            raise UserError(
                f"--lr-wsd-decay-{suffix} ({wsd}) must be from 0 to --lr-decay-{suffix} ({decay})"
            )


def differences(stored: Schedule, current: Schedule) -> list[str]:
    """Return ``name: stored -> current`` for everything that shapes the curves differently."""
    idle = set()
    if stored.weight_decay_style == current.weight_decay_style == "constant":
        idle.add("length")
    if "WSD" not in (stored.decay_style, current.decay_style):
        idle |= {"wsd_decay", "wsd_decay_style"}
    if stored.decay_style == current.decay_style == "constant":
        idle |= {"decay", "min_lr", "decoupled_min_lr"}
    pairs = [
        (item.name, getattr(stored, item.name), getattr(current, item.name))
        for item in dataclasses.fields(Schedule)
        if item.name not in idle
    ]
    return [f"{name}: {old} -> {new}" for name, old, new in pairs if old != new]


def choose(
    stored: Schedule, current: Schedule, *, override: bool, use_checkpoint: bool
) -> Schedule:
    """Return the schedule a resumed run follows: the flags' or the checkpoint's, never a mixture.

    Raises:
        UserError: they differ and no flag says which one holds.
    """
    if use_checkpoint:
        return stored
    changed = differences(stored, current)
    if changed and not override:
        raise UserError(
            "the checkpoint's schedule differs from the flags' (checkpoint -> flags): "
            + "; ".join(changed)
            + ". What no flag gives follows from others, the decay from --train-iters. Give "
            "--override-opt_param-scheduler to follow the flags or "
            "--use-checkpoint-opt_param-scheduler to follow the checkpoint"
        )
    return current


def describe_change(old: Schedule, new: Schedule) -> list[str]:
    """Return lines that show both curves at five points of the new run."""
    lines = [f"{new.unit:>12} | {'old rate':>12} -> {'new rate':>12} | old -> new weight decay"]
    for position in new.points():
        before, after = old.rates_at(position), new.rates_at(position)
        if old.unit != new.unit:
            before = Rates(math.nan, math.nan)
        ends = ""
        if not before.decoupled_lr == after.decoupled_lr is None:
            # A schedule without such a rate has the common one there.
            first, second = (
                r.lr if r.decoupled_lr is None else r.decoupled_lr for r in (before, after)
            )
            ends = f" | embedding and head {first:.6e} -> {second:.6e}"
        lines.append(
            f"{position:>12} | {before.lr:>12.6e} -> {after.lr:>12.6e} | "
            f"{before.weight_decay:g} -> {after.weight_decay:g}{ends}"
        )
    return lines
