"""The router of an expert layer: one matrix that gives each token a logit per expert.

Every rank holds the matrix whole and applies it to its own tokens. With sequence parallelism and
context parallelism ranks see different tokens and its gradient is partial; without sequence
parallelism the ranks of a tensor-parallel group route the same tokens alike.

Shapes: T tokens of this rank (S positions, this rank's share of them under sequence parallelism, of
B samples), H hidden, E experts, K chosen of each token.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core import sharding
from megatron.core.kernels.dtypes import accumulate_dtype
from megatron.core.mesh import Mesh
from megatron.core.tensor_parallel.layers import linear, make_parameter
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.context import Context
from megatron.core.transformer.init import inner_init
from megatron.core.transformer.moe import routing
from megatron.core.transformer.moe.routing import Routing

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class Router(nn.Module):
    """Choose experts for each token.

    Args:
        config: the architecture; `RouterConfig` is what routers are made of.
        layer: number in the whole model, from 0.
        mesh: axes and device.
        dtype: of the model's weights.
        num_experts: E.
        sequence_parallel: each tensor-parallel rank routes a share of the positions.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer: int,
        mesh: Mesh,
        dtype: torch.dtype,
        *,
        num_experts: int,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.layer, self.num_experts = config.router, layer, num_experts
        self.mesh, self.dtype, self.sequence_parallel = mesh, dtype, sequence_parallel
        wanted = config.router.moe_router_dtype
        self.product_dtype = torch.promote_types(dtype, DTYPES[wanted]) if wanted else dtype
        shape = (num_experts, config.hidden_size)
        record = sharding.whole(
            shape,
            inner_init(config, shape),
            replicated=("tp",),
            summed=("tp",) if sequence_parallel else (),
            matrix=True,
        )
        self.weight = make_parameter(record, shape, mesh, dtype)

    def forward(self, x_TH: Tensor, context: Context, shape: tuple[int, int]) -> Routing:
        """Return where the tokens of this rank go.

        Args:
            x_TH: positions of samples, position-major.
            context: of the microbatch.
            shape: (S, B).
        """
        logits_TE = self._logits(x_TH)
        scores_TE = routing.scores_of(logits_TE, self.config)
        experts_TK = routing.choose(scores_TE, self.config)
        weights_TK = routing.combine_weights(scores_TE, experts_TK, self.config)
        counts_E = routing.count(experts_TK, self.num_experts, None)
        return Routing(experts_TK, weights_TK.to(accumulate_dtype(self.dtype)), None, {}, counts_E)

    def _logits(self, x_TH: Tensor) -> Tensor:
        """Return the product with the router's matrix, fp32 or finer."""
        if self.product_dtype == self.dtype:
            logits_TE = linear(x_TH, self.weight, None, self.mesh.alone, False)
            return logits_TE.to(accumulate_dtype(self.dtype))
        assert sharding.is_there(self.weight), "a unit of the model was not called as a module"
        return F.linear(x_TH.to(self.product_dtype), self.weight.to(self.product_dtype))
