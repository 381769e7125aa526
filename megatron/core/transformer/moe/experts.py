"""The experts of a layer that a rank holds: feed-forward blocks, each with its own tokens.

Experts are spread over ``ep``, in order; each one's inner width is cut over ``etp`` as an MLP's is
over ``tp``: outputs of ranks along ``etp`` are partial sums. All matrices of a layer are one
logical tensor, ``[experts, outputs, inputs]``, of which a rank holds a box (of a gated unit's first
ones two boxes, gate and value). So a checkpoint reads them on any number of ranks, and a grouped
product finds a rank's matrices side by side, without a copy.

Gradients are those of the tokens of all ranks along ``etp_ep``, whom the dispatcher has brought
here; the rest is on the experts' replicas, along ``edp``.

Shapes: E experts of the model, e of this rank, N rows (one expert after the other), H channels of a
row (hidden, or of a latent), F inner width, f this rank's share of it.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from megatron.core.mesh import Mesh
from megatron.core.sharding import Init, Region, Sharding
from megatron.core.transformer.backends import Backends
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.init import inner_init, residual_init
from megatron.core.transformer.moe.grouped_linear import GroupedLinear
from megatron.core.transformer.saving import Lender, Runner, Saving
from megatron.core.utils import divide


class Experts(nn.Module):
    """``y = W2_e act(W1_e x)`` for the rows of each expert e of this rank."""

    def __init__(
        self,
        config: TransformerConfig,
        mesh: Mesh,
        dtype: torch.dtype,
        backends: Backends,
        saving: Saving,
    ) -> None:
        super().__init__()
        assert config.moe.num_experts is not None, "a model without experts"
        experts, hidden = config.moe.num_experts, config.routed_size
        inner, parts = config.moe.moe_ffn_hidden_size, 2 if config.mlp.is_gated else 1
        own, share = divide(experts, mesh.ep.size), divide(inner, mesh.etp.size)
        first = Sharding(
            (experts, parts * inner, hidden),
            _outputs(own, share, mesh, parts, hidden),
            inner_init(config, (parts * inner, hidden)),
            matrix=True,
            expert=True,
            fused=(("gate", inner), ("value", inner)) if parts == 2 else (),
        )
        second = replace(
            first,
            shape=(experts, hidden, inner),
            regions=(_inputs(own, share, mesh, hidden),),
            init=residual_init(config, (hidden, inner)),
            fused=(),
        )
        biases = (_bias(first), _bias(second)) if config.add_bias_linear else (None, None)
        products = backends.grouped_products
        shape = (own, parts * share, hidden)
        self.linear_fc1 = GroupedLinear(first, shape, biases[0], mesh, dtype, products)
        self.activation = backends.activation
        self.linear_fc2 = GroupedLinear(
            second,
            (own, hidden, share),
            biases[1],
            mesh,
            dtype,
            products,
            # Of the partial sums of ranks along etp one has the bias.
            adds_bias=mesh.etp.coordinate == 0,
        )
        self.run: Runner = saving.runner(self.linear_fc1, offloaded="expert_fc1")
        self.lend: Lender = saving.lender(self, recomputed="moe_act", offloaded="moe_act")

    def forward(self, x_NH: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the outputs of ``x``, whose rows are ``sizes[e]`` for each expert e."""
        h_Nf = self.run(partial(self.linear_fc1, sizes=sizes), x_NH)
        with self.lend(self.activation, h_Nf) as act_Nf:
            y_NH: Tensor = self.linear_fc2(act_Nf, sizes)
        return y_NH


def _outputs(own: int, share: int, mesh: Mesh, parts: int, hidden: int) -> tuple[Region, ...]:
    """Return the boxes of first matrices, whose outputs are cut: of each part a share."""
    ep, etp = mesh.ep.coordinate, mesh.etp
    inner = share * etp.size
    return tuple(
        Region(
            ((0, own), (part * share, (part + 1) * share), (0, hidden)),
            (
                (ep * own, (ep + 1) * own),
                (
                    part * inner + etp.coordinate * share,
                    part * inner + (etp.coordinate + 1) * share,
                ),
                (0, hidden),
            ),
        )
        for part in range(parts)
    )


def _inputs(own: int, share: int, mesh: Mesh, hidden: int) -> Region:
    """Return the box of second matrices, whose inputs are cut."""
    ep, etp = mesh.ep.coordinate, mesh.etp.coordinate
    return Region(
        ((0, own), (0, hidden), (0, share)),
        ((ep * own, (ep + 1) * own), (0, hidden), (etp * share, (etp + 1) * share)),
    )


def _bias(weight: Sharding) -> Sharding:
    """Return the record of the biases beside matrices; whoever has all outputs has all of it."""
    cut = weight.regions[0].local[2] == (0, weight.shape[2])
    regions = tuple(
        Region(region.local[:2], region.logical[:2], () if cut else ("etp",))
        for region in weight.regions
    )
    return replace(
        weight,
        shape=weight.shape[:2],
        regions=regions,
        init=Init(),
        decay=False,
        matrix=False,
        fused=(),
    )
