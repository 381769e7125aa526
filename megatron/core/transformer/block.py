"""The stack of layers that one pipeline stage owns.

Layers are registered under their number in the whole model, so that a parameter's path is its
logical name on every layout.

Shapes: S positions of this rank, B batch, H hidden size.
"""

from functools import partial

from torch import Tensor, nn

from megatron.core.transformer.context import Context
from megatron.core.transformer.layer import Surroundings, TransformerLayer, build_norm
from megatron.core.transformer.plan import layer_plan


class TransformerBlock(nn.Module):
    """The layers numbered ``layers`` and, on the last stage, the final norm."""

    def __init__(self, layers: range, has_final_norm: bool, around: Surroundings) -> None:
        super().__init__()
        plan = layer_plan(around.config)
        self.layers = nn.ModuleDict(
            {str(number): TransformerLayer(plan[number], around) for number in layers}
        )
        self.units = around.saving.units({number: self.layers[str(number)] for number in layers})
        self.final_layernorm = build_norm(around) if has_final_norm else None

    def forward(self, x_SBH: Tensor, context: Context) -> Tensor:
        for numbers, run in self.units:
            x_SBH = run(partial(self._through, numbers, context), x_SBH)
        return x_SBH if self.final_layernorm is None else self.final_layernorm(x_SBH)

    def _through(self, numbers: tuple[int, ...], context: Context, x_SBH: Tensor) -> Tensor:
        for number in numbers:
            x_SBH = self.layers[str(number)](x_SBH, context)
        return x_SBH
