"""Lion (Chen et al., 2023, https://arxiv.org/abs/2302.06675), on flat ranges.

    p = p (1 - lr wd) - lr sign(beta1 m + (1 - beta1) g)
    m = beta2 m + (1 - beta2) g

Without decoupling ``wd p`` is added to ``g`` instead. Every weight moves by the learning rate, so
that wants to be some three to ten times smaller than Adam's.
"""

from megatron.core.optimizer import rules
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.update import Ranges, Step, unscale


class Lion:
    """The update rule of ``--optimizer lion``."""

    needs_whole = rules.needs_whole("lion")

    def __init__(self, config: OptimizerConfig) -> None:
        self.beta1, self.beta2 = config.lion_beta1, config.lion_beta2
        self.decoupled = config.decoupled_weight_decay

    def takes_as_kept(self, ranges: Ranges) -> bool:
        """Return False: ranges of several dtypes are widened; see `UpdateRule`."""
        return False

    def update(self, ranges: Ranges, step: Step) -> None:
        """Update ranges in place; see `UpdateRule`."""
        lr, decay = step.settings.lr, step.settings.weight_decay
        moments = ranges.states["exp_avg"]
        for parameter, given, moment in zip(ranges.parameters, ranges.grads, moments, strict=True):
            grad, keep = unscale(given, step)
            if not self.decoupled:
                grad = grad.add(parameter, alpha=decay)
            direction = moment.lerp(grad, 1 - self.beta1).sign_()
            if self.decoupled:
                parameter.mul_(1 - lr * decay * keep)
            parameter.sub_(direction.mul_(lr * keep))
            moment.lerp_(grad, (1 - self.beta2) * keep)
