"""How far a run has come: all that a checkpoint stores besides tensors."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron.core.optimizer.schedule import Progress


@dataclass
class TrainState:
    """Counters of a run; what every iteration does follows from them."""

    iteration: int = 0
    """Iterations done."""
    consumed_samples: int = 0
    """Samples they took from the training set, trained on or not."""
    skipped_samples: int = 0
    """Samples of iterations that were left out by request."""
    flops: float = 0.0
    """Floating-point operations of the model so far."""
    evaluated: dict[str, int] = field(default_factory=dict)
    """Samples read of each held-out set."""

    @property
    def progress(self) -> Progress:
        """Return what the schedules of rates go by."""
        return Progress(self.iteration, self.consumed_samples)

    def to_json(self) -> dict[str, Any]:
        """Return the state as a checkpoint stores it."""
        return asdict(self)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "TrainState":
        """Return the state that `to_json` gave."""
        return cls(**stored)
