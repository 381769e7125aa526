"""Adam (Kingma & Ba, 2015) with decoupled weight decay (Loshchilov & Hutter, 2019), on flat ranges.

    m = beta1 m + (1 - beta1) g                v = beta2 v + (1 - beta2) g^2
    p = p (1 - lr wd) - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

Without decoupling ``wd p`` is added to ``g`` instead. One fused kernel reads and writes each array
once, on CPU and CUDA; it also scales the gradient and leaves everything alone when told that the
gradient is not finite, so that nobody waits for the device.
"""

import torch
from torch import Tensor

from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.groups import Settings


class Adam:
    """The update rule of ``--optimizer adam``."""

    state_names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def __init__(self, config: OptimizerConfig) -> None:
        self.beta1, self.beta2 = config.adam_beta1, config.adam_beta2
        self.eps = config.adam_eps
        decoupled = config.decoupled_weight_decay
        self._kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_

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
        """Update one range in place.

        Args:
            parameter: fp32 or fp64, one-dimensional.
            grad: of the same dtype; divided by ``inverse_scale`` in place.
            state: the moments.
            settings: learning rate and decay of the range's group.
            step: number of this update, from 1.
            inverse_scale: fp32 divisor of the gradient; None leaves it.
            found_nonfinite: fp32; 1 leaves everything as it is.
        """
        self._kernel(
            [parameter],
            [grad],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [step],
            lr=settings.lr,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=settings.weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=inverse_scale,
            found_inf=found_nonfinite,
        )
