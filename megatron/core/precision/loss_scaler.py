"""The loss scale: what the loss is multiplied by before backward, and when that changes.

fp16 holds nothing below 6e-8: gradients times a large enough scale stay above that, and the
optimizer divides the scale out again (Micikevicius et al., 2018, section 3.2). A *constant* scale
stays as it is. A *dynamic* one is as large as gradients allow, by Megatron-LM's rules:

    overflow          leave the step out; once --hysteresis overflows have come since the scale last
                      grew, halve the scale, at this overflow and at each that follows
    no overflow       after --loss-scale-window such steps in a row double the scale, and count
                      overflows anew

It never falls below --min-loss-scale. All ranks see the same overflows, so all have the same scale.
"""

from collections.abc import Mapping

from megatron.core.precision.config import PrecisionConfig

GROWTH, BACKOFF = 2.0, 0.5


class LossScaler:
    """The loss scale of a run; 1 where none is asked for.

    `state` and `load_state` carry a dynamic scale over a checkpoint, to the last bit.
    """

    def __init__(self, config: PrecisionConfig) -> None:
        self.is_dynamic = config.is_scale_dynamic
        self.scale = config.initial_loss_scale if self.is_dynamic else config.loss_scale or 1.0
        """What the next loss is multiplied by."""
        self._minimum, self._window = config.min_loss_scale, config.loss_scale_window
        self._hysteresis = config.hysteresis
        self._steps = 0
        """Steps in a row without an overflow."""
        self._overflows_left = config.hysteresis
        """Overflows that the scale still bears."""

    @property
    def can_fall(self) -> bool:
        """Return whether a smaller scale may cure an overflow."""
        return self.is_dynamic and self.scale > self._minimum

    def update(self, *, overflow: bool) -> None:
        """Take note of how an iteration ended: with a step, or with gradients not finite."""
        if not self.is_dynamic:
            return
        if overflow:
            self._steps = 0
            self._overflows_left -= 1
            if self._overflows_left <= 0:
                self.scale = max(self.scale * BACKOFF, self._minimum)
            return
        self._steps += 1
        if self._steps >= self._window:
            self._steps, self._overflows_left = 0, self._hysteresis
            self.scale *= GROWTH

    def state(self) -> dict[str, float]:
        """Return the scale and its counters, as a checkpoint stores them; {} for a constant."""
        if not self.is_dynamic:
            return {}
        return {
            "scale": self.scale,
            "steps": self._steps,
            "overflows_left": self._overflows_left,
        }

    def load_state(self, stored: Mapping[str, float]) -> None:
        """Set what `state` gave; a constant scale, and a state of a constant one, change nothing.

        Args:
            stored: by a run whose scale was dynamic, or {}.
        """
        if self.is_dynamic and stored:
            self.scale = float(stored["scale"])
            self._steps = int(stored["steps"])
            self._overflows_left = int(stored["overflows_left"])
