"""Adam (Kingma & Ba, 2015) with decoupled weight decay (Loshchilov & Hutter, 2019), on flat ranges.

    m = beta1 m + (1 - beta1) g                v = beta2 v + (1 - beta2) g^2
    p = p (1 - lr wd) - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

Without decoupling ``wd p`` is added to ``g`` instead. One fused kernel reads and writes each array
once, on CPU and CUDA; it also scales the gradient and leaves everything alone when told that the
gradient is not finite, so that nobody waits for the device.
"""

import torch

from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.update import Ranges, Step


class Adam:
    """The update rule of ``--optimizer adam``."""

    state_names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    needs_whole = False

    def __init__(self, config: OptimizerConfig) -> None:
        self.beta1, self.beta2 = config.adam_beta1, config.adam_beta2
        self.eps = config.adam_eps
        decoupled = config.decoupled_weight_decay
        self._kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_

    def update(self, ranges: Ranges, step: Step) -> None:
        """Update ranges in place; see `UpdateRule`."""
        self._kernel(
            ranges.parameters,
            ranges.grads,
            ranges.states["exp_avg"],
            ranges.states["exp_avg_sq"],
            [],
            [step.number] * len(ranges.parameters),
            lr=step.settings.lr,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=step.settings.weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=step.inverse_scale,
            found_inf=step.found_nonfinite,
        )
