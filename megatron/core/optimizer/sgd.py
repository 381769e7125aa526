"""Stochastic gradient descent with momentum, on flat ranges.

With ``b`` the momentum buffer, ``b = momentum b + g + wd p`` and then ``p = p - lr b``.
"""

import torch

from megatron.core.optimizer import rules
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.update import Ranges, Step


class SGD:
    """The update rule of ``--optimizer sgd``."""

    needs_whole = rules.needs_whole("sgd")

    def __init__(self, config: OptimizerConfig) -> None:
        self.momentum = config.sgd_momentum

    def takes_as_kept(self, ranges: Ranges) -> bool:
        """Return False: ranges of several dtypes are widened; see `UpdateRule`."""
        return False

    def update(self, ranges: Ranges, step: Step) -> None:
        """Update ranges in place; see `UpdateRule`."""
        torch._fused_sgd_(
            ranges.parameters,
            ranges.grads,
            ranges.states.get("momentum_buffer", []),
            weight_decay=step.settings.weight_decay,
            momentum=self.momentum,
            lr=step.settings.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            # A buffer of zeros gives the same first step as none.
            is_first_step=False,
            grad_scale=step.inverse_scale,
            found_inf=step.found_nonfinite,
        )
