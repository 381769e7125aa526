"""The feed-forward block: widen, activate, narrow.

Shapes: S sequence, B batch, H hidden, F inner width; f is this rank's share of F.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron.core import sharding
from megatron.core.mesh import Mesh
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.backends import Backends
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.context import Context
from megatron.core.transformer.init import inner_init, residual_init
from megatron.core.utils import divide


class MLP(nn.Module):
    """``y = W2 act(W1 x)``; a gated unit's W1 holds the gate's rows, then the value's."""

    def __init__(
        self,
        config: TransformerConfig,
        mesh: Mesh,
        dtype: torch.dtype,
        backends: Backends,
        *,
        sequence_parallel: bool = False,
        inner: int | None = None,
    ) -> None:
        """Make the block.

        Args:
            config: the architecture.
            mesh: axes and device.
            dtype: of parameters and activations.
            backends: the chosen ops.
            sequence_parallel: activations outside are split along the sequence.
            inner: inner width; --ffn-hidden-size when absent.
        """
        super().__init__()
        hidden, inner = config.hidden_size, inner or config.mlp.ffn_hidden_size
        parts = 2 if config.mlp.is_gated else 1
        share = divide(inner, mesh.tp.size)
        shape = (parts * inner, hidden)
        fc1 = sharding.split(
            shape, inner_init(config, shape), 0, mesh.tp.coordinate, mesh.tp.size, parts=parts
        )
        if config.mlp.is_gated:
            fc1 = replace(fc1, fused=(("gate", inner), ("value", inner)))
        back = (hidden, inner)
        fc2 = sharding.split(back, residual_init(config, back), 1, mesh.tp.coordinate, mesh.tp.size)
        self.linear_fc1 = ColumnParallelLinear(
            fc1,
            parts * share,
            mesh,
            dtype,
            bias=config.add_bias_linear,
            sequence_parallel=sequence_parallel,
        )
        self.activation = backends.activation
        self.linear_fc1.adds_bias = not backends.fuses_activation_bias
        self.linear_fc2 = RowParallelLinear(
            fc2,
            share,
            mesh,
            dtype,
            bias=config.add_bias_linear,
            sequence_parallel=sequence_parallel,
        )

    def forward(self, x_SBH: Tensor, context: Context) -> Tensor:
        fc1 = self.linear_fc1
        h_SBf = self.activation(fc1(x_SBH), None if fc1.adds_bias else fc1.bias)
        y_SBH: Tensor = self.linear_fc2(h_SBf)
        return y_SBH
