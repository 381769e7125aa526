"""A layer's channel block as a mixture of experts: route, dispatch, compute, combine.

    y = sum over the experts e of a token of weight_e expert_e(x)  [ + gate(x) shared(x) ]

(Shazeer et al., 2017; Lepikhin et al., 2020; shared experts: Dai et al., 2024.) Every rank routes
tokens of its own: those that sequence parallelism has given it, else a share of the positions that
all ranks along ``tp`` hold, whose results are gathered afterwards. Positions that do not divide are
filled up with ones of zeros that count nowhere. Shared experts are an MLP, cut over ``tp`` as any;
with --moe-shared-expert-overlap they compute while the tokens travel.

With a latent the routed part is  up(sum of weight_e expert_e(down(x))):  tokens travel, and are
joined, in its width. Every rank holds both projections whole and applies them to its own tokens.

Shapes: S positions of this rank, B batch, H hidden, L channels of the latent (or H), T tokens of
this rank alone.
"""

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core import sharding
from megatron.core.grid import runs_met
from megatron.core.mesh import Mesh
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.layers import WholeLinear, linear, make_parameter
from megatron.core.transformer.backends import Backends
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.context import Context
from megatron.core.transformer.init import inner_init, residual_init
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.dispatcher import Beside, Compute, build_dispatcher, nothing
from megatron.core.transformer.moe.experts import Experts
from megatron.core.transformer.moe.padding import padded
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.saving import Saving


class MoELayer(nn.Module):
    """Experts of which each token visits a few, and shared ones that it visits in any case.

    Args:
        config: the architecture.
        layer: number in the whole model, from 0.
        mesh: axes and device.
        dtype: of parameters and activations.
        backends: the chosen ops.
        saving: how parts keep what backward needs.
        sequence_parallel: activations outside are split along the sequence.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer: int,
        mesh: Mesh,
        dtype: torch.dtype,
        backends: Backends,
        saving: Saving,
        *,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        moe = config.moe
        assert moe.num_experts is not None, "a model without experts"
        self.num_layers = config.num_layers
        self.axis, self.cuts = mesh.tp, not sequence_parallel and mesh.tp.size > 1
        self.router = Router(
            config,
            layer,
            mesh,
            dtype,
            num_experts=moe.num_experts,
            sequence_parallel=sequence_parallel or self.cuts,
            routes=backends.routing,
        )
        # Names of Megatron-LM's.
        self.fc1_latent_proj: nn.Module = nn.Identity()
        self.fc2_latent_proj: nn.Module = nn.Identity()
        if moe.moe_latent_size is not None:
            down = (moe.moe_latent_size, config.hidden_size)
            up, parted = down[::-1], sequence_parallel or self.cuts
            bias = config.add_bias_linear
            init = inner_init(config, down)
            self.fc1_latent_proj = WholeLinear(down, init, mesh, dtype, parted, bias=bias)
            init = residual_init(config, up)
            self.fc2_latent_proj = WholeLinear(up, init, mesh, dtype, parted, bias=bias)
        self.experts = Experts(config, mesh, dtype, backends, saving)
        self.dispatch = build_dispatcher(
            moe.moe_token_dispatcher_type,
            moe.num_experts,
            mesh,
            dtype,
            backends.permute,
            moe.moe_flex_dispatcher_num_sms,
        )
        self.pads = config.router.moe_pad_expert_input_to_capacity
        # Of as many microbatches tokens may come to the experts of a rank: each has a capacity.
        self.num_capacities = runs_met(mesh.etp_ep.size, self.router.sharers.count)
        self.shared_experts: SharedExperts | None = None
        if moe.moe_shared_expert_intermediate_size is not None:
            self.shared_experts = SharedExperts(
                config, mesh, dtype, backends, sequence_parallel=sequence_parallel
            )
            self.run_shared = saving.runner(self.shared_experts, recomputed="shared_experts")
        self.overlaps = moe.moe_shared_expert_overlap

    def forward(self, x_SBH: Tensor, context: Context) -> Tensor:
        x_SBH = x_SBH.contiguous()  # once for all that keep it
        if self.shared_experts is None:
            return self._routed_of_all(x_SBH, context, nothing)
        experts = partial(self.shared_experts, context=context)
        shared_SBH: list[Tensor] = []

        def share() -> None:
            shared_SBH.append(self.run_shared(experts, x_SBH))

        y_SBH = self._routed_of_all(x_SBH, context, share if self.overlaps else nothing)
        if not self.overlaps:
            share()
        return y_SBH + shared_SBH.pop()

    def _routed_of_all(self, x_SBH: Tensor, context: Context, beside: Beside) -> Tensor:
        """Return what the routed experts make of the tokens that are held here, shared or not."""
        if not self.cuts:
            return self._routed(x_SBH, context, beside)
        positions = x_SBH.shape[0]
        filled_SBH, context = _filled(x_SBH, context, self.axis.size)
        added = filled_SBH.shape[0] - positions
        own_SBH = self._routed(mappings.cut(filled_SBH, self.axis), context, beside, added)
        return mappings.join(own_SBH, self.axis)[:positions]

    def _routed(self, x_SBH: Tensor, context: Context, beside: Beside, added: int = 0) -> Tensor:
        """Return what the routed experts make of this rank's tokens.

        ``added`` of the positions of all ranks along ``tp``, the last ones, were added.
        """
        x_TH, shape = x_SBH.flatten(0, 1), (x_SBH.shape[0], x_SBH.shape[1])
        routing = self.router(x_TH, context, shape, filled=added)
        compute: Compute = self.experts
        if self.pads and routing.capacity is not None:
            compute = padded(compute, routing.capacity * self.num_capacities)
        y_TL = self.dispatch(self.fc1_latent_proj(x_TH), routing, compute, beside)
        y_TH: Tensor = self.fc2_latent_proj(y_TL)
        if context.balance is not None:
            y_TH = context.balance.attach(y_TH, routing, id(self))
        return y_TH.view_as(x_SBH)


def _filled(x_SBH: Tensor, context: Context, ranks: int) -> tuple[Tensor, Context]:
    """Return positions that divide over ``ranks``; those that were added are not valid."""
    missing = -x_SBH.shape[0] % ranks
    if not missing:
        return x_SBH, context
    valid_SB = context.valid_SB
    if valid_SB is None:
        valid_SB = x_SBH.new_ones(x_SBH.shape[:2], dtype=torch.bool)
    tokens_SB = context.tokens_SB
    if tokens_SB is not None:
        tokens_SB = F.pad(tokens_SB, (0, 0, 0, missing))
    context = replace(context, valid_SB=F.pad(valid_SB, (0, 0, 0, missing)), tokens_SB=tokens_SB)
    return F.pad(x_SBH, (0, 0, 0, 0, 0, missing)), context


class SharedExperts(MLP):
    """An MLP that every token visits, scaled by a sigmoid of the token where there is a gate."""

    def __init__(
        self,
        config: TransformerConfig,
        mesh: Mesh,
        dtype: torch.dtype,
        backends: Backends,
        *,
        sequence_parallel: bool,
    ) -> None:
        moe = config.moe
        super().__init__(
            config,
            mesh,
            dtype,
            backends,
            sequence_parallel=sequence_parallel,
            inner=moe.moe_shared_expert_intermediate_size,
        )
        self.alone = mesh.alone
        self.gate_weight: nn.Parameter | None = None
        if moe.moe_shared_expert_gate:
            shape = (1, config.hidden_size)
            record = sharding.whole(
                shape,
                inner_init(config, shape),
                replicated=("tp",),
                summed=("tp",) if sequence_parallel else (),
            )
            self.gate_weight = make_parameter(record, shape, mesh, dtype)

    def forward(self, x_SBH: Tensor, context: Context) -> Tensor:
        y_SBH = super().forward(x_SBH, context)
        if self.gate_weight is None:
            return y_SBH
        return y_SBH * linear(x_SBH, self.gate_weight, None, self.alone, False).sigmoid()
