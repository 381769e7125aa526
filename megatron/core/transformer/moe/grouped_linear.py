"""A linear layer for every expert of a rank: one parameter that holds all their matrices.

As the layers of `tensor_parallel` do, it adds its weight gradient straight to ``weight.grad``, and
leaves it to whoever postpones weight gradients.

Shapes: E experts of this rank, N rows (of all experts, one expert after the other), I input and O
output features of this rank.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core import sharding
from megatron.core.kernels.grouped import GroupedProducts, parts
from megatron.core.mesh import Mesh
from megatron.core.sharding import Sharding
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import make_parameter


class _Grouped(torch.autograd.Function):
    """``y = x @ W_e.T + b_e`` for the rows of each expert e; ``adds`` says if b is added here."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NI: Tensor,
        weight_EOI: Tensor,
        bias_EO: Tensor | None,
        sizes: Sequence[int],
        products: GroupedProducts,
        adds: bool,
    ) -> Tensor:
        assert sharding.is_there(weight_EOI), "a unit of the model was not called as a module"
        ctx.save_for_backward(x_NI)
        # Not saved as the input is, as in `tensor_parallel.layers`.
        ctx.weight_EOI, ctx.bias_EO = weight_EOI, bias_EO
        ctx.sizes, ctx.products = sizes, products
        y_NO = products.product(x_NI, weight_EOI.transpose(1, 2), sizes)
        if bias_EO is not None and adds:
            for expert, rows in parts(sizes):
                y_NO[rows] += bias_EO[expert]
        return y_NO

    @staticmethod
    def backward(
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        x_NI, grad_NO = ctx.saved_tensors[0].detach(), grads[0].contiguous()
        weight_EOI, bias_EO, sizes = ctx.weight_EOI, ctx.bias_EO, ctx.sizes
        assert sharding.is_there(weight_EOI), "the backward came without its unit's weights"
        dx_NI = dw_EOI = db_EO = None
        if ctx.needs_input_grad[0]:
            dx_NI = ctx.products.product(grad_NO, weight_EOI, sizes)
        if ctx.needs_input_grad[1]:
            rest = (grad_NO, x_NI, sizes, ctx.products)
            dw_EOI = layers.now_or_postponed(_weight_gradient, weight_EOI, *rest)
        if bias_EO is not None and ctx.needs_input_grad[2]:
            sums = grad_NO.new_zeros(bias_EO.shape)
            for expert, rows in parts(sizes):
                sums[expert] = grad_NO[rows].sum(0)
            db_EO = layers.accumulate(bias_EO, sums)
        return dx_NI, dw_EOI, db_EO, None, None, None


@torch.no_grad()  # as whoever runs a postponed closure may not have switched it off
def _weight_gradient(
    weight_EOI: Tensor,
    grad_NO: Tensor,
    x_NI: Tensor,
    sizes: Sequence[int],
    products: GroupedProducts,
) -> Tensor | None:
    """Add the gradients to the weight's buffer, or return them when there is none."""
    if weight_EOI.grad is None:
        total_EOI = torch.zeros_like(weight_EOI)
        products.accumulate(total_EOI, grad_NO, x_NI, sizes)
        return total_EOI
    products.accumulate(weight_EOI.grad, grad_NO, x_NI, sizes)
    return None


class GroupedLinear(nn.Module):
    """``y = x @ W_e.T + b_e``: an own matrix for each expert of this rank.

    Args:
        weight: record of the matrices, ``[experts, outputs, inputs]`` in the whole model.
        shape: (E, O, I) of this rank.
        bias: record of the biases, or None for none.
        mesh: axes and device.
        dtype: of the parameters.
        products: how groups of rows are multiplied.
        adds_bias: this rank's outputs have the bias; else those of another rank, to which they are
            added, have it. Its gradient is computed in either case.
    """

    def __init__(
        self,
        weight: Sharding,
        shape: tuple[int, int, int],
        bias: Sharding | None,
        mesh: Mesh,
        dtype: torch.dtype,
        products: GroupedProducts,
        *,
        adds_bias: bool = True,
    ) -> None:
        super().__init__()
        self.products, self.adds_bias = products, adds_bias
        self.weight = make_parameter(weight, shape, mesh, dtype)
        self.bias = None if bias is None else make_parameter(bias, shape[:2], mesh, dtype)

    def forward(self, x_NI: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the outputs of ``x``, whose rows are ``sizes[e]`` for each expert e."""
        return _Grouped.apply(  # type: ignore[no-any-return]
            x_NI, self.weight, self.bias, sizes, self.products, self.adds_bias
        )
