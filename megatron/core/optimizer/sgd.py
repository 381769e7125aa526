"""Stochastic gradient descent with momentum, on flat ranges.

With ``b`` the momentum buffer, ``b = momentum b + g + wd p`` and then ``p = p - lr b``.
"""

import torch
from torch import Tensor

from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.groups import Settings


class SGD:
    """The update rule of ``--optimizer sgd``."""

    state_names: tuple[str, ...]

    def __init__(self, config: OptimizerConfig) -> None:
        self.momentum = config.sgd_momentum
        self.state_names = ("momentum_buffer",) if self.momentum else ()

    def update(
        self,
        parameter: Tensor,
        grad: Tensor,
        state: dict[str, Tensor],
        settings: Settings,
        *,
        step: Tensor,
        inverse_scale: Tensor | None,
        found_nonfinite: Tensor,
    ) -> None:
        """Update one range in place; the arguments are those of `Adam.update`."""
        torch._fused_sgd_(
            [parameter],
            [grad],
            list(state.values()),
            weight_decay=settings.weight_decay,
            momentum=self.momentum,
            lr=settings.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            # A buffer of zeros gives the same first step as none.
            is_first_step=False,
            grad_scale=inverse_scale,
            found_inf=found_nonfinite,
        )
