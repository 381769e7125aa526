"""The layers of a stack that one pipeline stage owns.

Layers are registered under their place in the whole stack, so that a parameter's path is its
logical name on every layout.

Shapes: S positions of this rank, B batch, H hidden size.
"""

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from megatron.core.transformer.context import Context
from megatron.core.transformer.layer import Surroundings, TransformerLayer, build_norm
from megatron.core.transformer.plan import LayerPlan


class TransformerBlock(nn.Module):
    """The given layers and, at the end of a stack, the final norm."""

    def __init__(
        self, plans: Sequence[LayerPlan], has_final_norm: bool, around: Surroundings
    ) -> None:
        super().__init__()
        self.names = {plan.number: plan.name for plan in plans}
        self.layers = nn.ModuleDict({plan.name: TransformerLayer(plan, around) for plan in plans})
        self.units = around.saving.units(
            {number: self.layers[name] for number, name in self.names.items()}
        )
        self.final_layernorm = build_norm(around) if has_final_norm else None

    def forward(self, x_SBH: Tensor, context: Context) -> Tensor:
        for numbers, run in self.units:
            x_SBH = run(partial(self._through, numbers, context), x_SBH)
        return x_SBH if self.final_layernorm is None else self.final_layernorm(x_SBH)

    def _through(self, numbers: tuple[int, ...], context: Context, x_SBH: Tensor) -> Tensor:
        for number in numbers:
            x_SBH = self.layers[self.names[number]](x_SBH, context)
        return x_SBH
