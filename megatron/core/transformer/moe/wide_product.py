"""A router's product in a finer dtype than the model's (--moe-router-dtype).

    y = x' W'^T      dx = dy W', rounded once      dW += dy^T x', in the dtype of its buffer

x' and W' are copies in the finer dtype that live as long as a product does: for backward the input
is kept as it is, which its layer keeps anyway. As elsewhere the weight gradient is added straight
to ``weight.grad``, so that a microbatch's is never rounded to half, and may be postponed.

Shapes: T tokens, H hidden, E experts.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core import sharding
from megatron.core.tensor_parallel import layers


def wide_product(x_TH: Tensor, weight_EH: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x @ weight.T``, computed and returned in ``dtype``."""
    return _Wide.apply(x_TH, weight_EH, dtype)  # type: ignore[no-any-return]


class _Wide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_EH: Tensor, dtype: torch.dtype) -> Tensor:
        assert sharding.is_there(weight_EH), "a unit of the model was not called as a module"
        ctx.save_for_backward(x_TH)
        ctx.weight_EH = weight_EH  # not saved as the input is, as in `tensor_parallel.layers`
        return F.linear(x_TH.to(dtype), weight_EH.to(dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_TH, (grad_TE,), weight_EH = ctx.saved_tensors[0].detach(), grads, ctx.weight_EH
        assert sharding.is_there(weight_EH), "the backward came without its unit's weights"
        dx_TH = dw_EH = None
        if ctx.needs_input_grad[0]:
            dx_TH = (grad_TE @ weight_EH.to(grad_TE.dtype)).to(x_TH.dtype)
        if ctx.needs_input_grad[1]:
            dw_EH = layers.now_or_postponed(_weight_gradient, weight_EH, grad_TE, x_TH)
        return dx_TH, dw_EH, None


@torch.no_grad()  # as whoever runs a postponed closure may not have switched it off
def _weight_gradient(weight_EH: Tensor, grad_TE: Tensor, x_TH: Tensor) -> Tensor | None:
    """Add the gradient to the weight's buffer, or return it when there is none."""
    dw_EH = grad_TE.t() @ x_TH.to(grad_TE.dtype)
    if weight_EH.grad is None:
        return dw_EH.to(weight_EH.dtype)
    weight_EH.grad.add_(dw_EH)
    return None
