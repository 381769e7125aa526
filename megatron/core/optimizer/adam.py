"""Adam (Kingma & Ba, 2015) with decoupled weight decay (Loshchilov & Hutter, 2019), on flat ranges.

    m = beta1 m + (1 - beta1) g                v = beta2 v + (1 - beta2) g^2
    p = p (1 - lr wd) - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

Without decoupling ``wd p`` is added to ``g`` instead. One fused kernel reads and writes each array
once, on CPU and CUDA; it also scales the gradient and leaves everything alone when told that the
gradient is not finite, so that nobody waits for the device. Where Triton is there, another kernel
does the same for arrays that are kept in several dtypes.
"""

import torch
from torch import Tensor

from megatron.core.kernels import table
from megatron.core.kernels.adam import AdamStep
from megatron.core.optimizer import rules
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.update import Ranges, Step


class Adam:
    """The update rule of ``--optimizer adam``."""

    needs_whole = rules.needs_whole("adam")

    def __init__(self, config: OptimizerConfig) -> None:
        self.beta1, self.beta2 = config.adam_beta1, config.adam_beta2
        self.eps = config.adam_eps
        self.decoupled = config.decoupled_weight_decay
        self._kernel = torch._fused_adamw_ if self.decoupled else torch._fused_adam_

    def takes_as_kept(self, ranges: Ranges) -> bool:
        """Return whether there is a kernel for several dtypes; see `UpdateRule`."""
        device = ranges.parameters[0].device
        wide = any(tensor.dtype == torch.float64 for tensor in _arrays(ranges))
        return not wide and table.choose("adam", "auto", device, torch.float32) == "triton"

    def update(self, ranges: Ranges, step: Step) -> None:
        """Update ranges in place; see `UpdateRule`."""
        if len({tensor.dtype for tensor in _arrays(ranges)}) > 1:
            self._update_as_kept(ranges, step)
            return
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

    def _update_as_kept(self, ranges: Ranges, step: Step) -> None:
        how = AdamStep(
            step.settings.lr,
            self.beta1,
            self.beta2,
            self.eps,
            step.settings.weight_decay,
            self.decoupled,
            step.number,
            step.inverse_scale,
            step.found_nonfinite,
        )
        kernel = table.select("adam", "triton", ranges.parameters[0].device, torch.float32)
        means, squares = ranges.states["exp_avg"], ranges.states["exp_avg_sq"]
        for arrays in zip(ranges.parameters, ranges.grads, means, squares, strict=True):
            kernel(*arrays, how)


def _arrays(ranges: Ranges) -> list[Tensor]:
    states = [tensor for tensors in ranges.states.values() for tensor in tensors]
    return [*ranges.parameters, *ranges.grads, *states]
