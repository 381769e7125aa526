"""LayerNorm and RMSNorm as modules; every rank of the tensor-parallel axis holds them whole.

Shapes: N rows (every leading dim), H the dim that is normalised.
"""

import torch
from torch import Tensor, nn

from megatron.core import sharding
from megatron.core.mesh import Mesh
from megatron.core.sharding import Init
from megatron.core.tensor_parallel.layers import make_parameter
from megatron.core.transformer.backends import Backends
from megatron.core.transformer.config import NormConfig


class Norm(nn.Module):
    """Normalise the last dim and scale it by learned gains.

    ``summed`` names the axes along which ranks see different tokens or heads: there the gains'
    gradients are partial.

    The result has the dtype of the gains, also where the input is finer: blocks read an fp32
    residual stream in half, and statistics and gains are applied before that rounding.
    """

    def __init__(
        self,
        size: int,
        config: NormConfig,
        mesh: Mesh,
        dtype: torch.dtype,
        backends: Backends,
        summed: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self.epsilon = config.norm_epsilon
        self.zero_centered = config.apply_layernorm_1p
        one = Init(scale=0.0 if self.zero_centered else 1.0)
        gain = sharding.whole((size,), one, replicated=("tp",), summed=summed, decay=False)
        self.weight = make_parameter(gain, (size,), mesh, dtype)
        self.bias: nn.Parameter | None = None
        if config.normalization == "LayerNorm":
            shift = sharding.whole((size,), Init(), replicated=("tp",), summed=summed, decay=False)
            self.bias = make_parameter(shift, (size,), mesh, dtype)
        self.layer_norm, self.rms_norm = backends.layer_norm, backends.rms_norm

    def forward(self, x_NH: Tensor) -> Tensor:
        assert sharding.is_there(self.weight), "a unit of the model was not called as a module"
        gain_H = self.weight.to(x_NH.dtype)
        if self.bias is None:
            y_NH = self.rms_norm(x_NH, gain_H, self.epsilon, self.zero_centered)
        else:
            shift_H = self.bias.to(x_NH.dtype)
            y_NH = self.layer_norm(x_NH, gain_H, shift_H, self.epsilon, self.zero_centered)
        return y_NH.to(self.weight.dtype)
