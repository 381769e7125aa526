"""A layer is a short list of sub-layers: ``x + dropout(block(norm(x)))`` each.

Shapes: S sequence, B batch, H hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from megatron.core.kernels.dtypes import accumulate_dtype
from megatron.core.mesh import Mesh
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.backends import Backends
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.context import Context
from megatron.core.transformer.cross_attention import CrossAttention
from megatron.core.transformer.mla import MultiLatentAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.layer import MoELayer
from megatron.core.transformer.norm import Norm
from megatron.core.transformer.plan import BlockKind, LayerPlan
from megatron.core.transformer.saving import Lender, Runner, Saving


@dataclass(frozen=True)
class Surroundings:
    """What every module of a model is built with."""

    config: TransformerConfig
    mesh: Mesh
    dtype: torch.dtype
    backends: Backends
    saving: Saving
    sequence_parallel: bool = False
    context_kinds: tuple[str, ...] = ("p2p",)
    """How attention over the sequence's ranks communicates: of all layers, or of each."""

    @property
    def residual_dtype(self) -> torch.dtype:
        """Return the dtype of the residual stream, within a stage and between stages."""
        fp32 = self.config.fp32_residual_connection
        return accumulate_dtype(self.dtype) if fp32 else self.dtype

    @property
    def norm_summed(self) -> tuple[str, ...]:
        """Return the axes along which norms of the residual stream see different tokens."""
        return ("tp",) if self.sequence_parallel else ()


ATTENTIONS: dict[BlockKind, Callable[..., nn.Module]] = {
    "self_attention": SelfAttention,
    "multi_latent_attention": MultiLatentAttention,
    "cross_attention": CrossAttention,
}


def build_block(kind: BlockKind, layer: int, around: Surroundings) -> nn.Module:
    """Return one token mixer or channel block."""
    if kind not in ("mlp", "moe"):
        return ATTENTIONS[kind](
            around.config,
            layer,
            around.mesh,
            around.dtype,
            around.backends,
            around.saving,
            sequence_parallel=around.sequence_parallel,
            context_kind=around.context_kinds[layer if len(around.context_kinds) > 1 else 0],
        )
    if kind == "moe":
        return MoELayer(
            around.config,
            layer,
            around.mesh,
            around.dtype,
            around.backends,
            around.saving,
            sequence_parallel=around.sequence_parallel,
        )
    assert kind == "mlp", kind
    return MLP(
        around.config,
        around.mesh,
        around.dtype,
        around.backends,
        sequence_parallel=around.sequence_parallel,
    )


def build_norm(around: Surroundings) -> Norm:
    """Return a norm of the residual stream."""
    return Norm(
        around.config.hidden_size,
        around.config.norm,
        around.mesh,
        around.dtype,
        around.backends,
        around.norm_summed,
    )


def last_linear(kind: BlockKind, block: nn.Module) -> RowParallelLinear | None:
    """Return the layer that gives a block's output, if it is one layer."""
    if kind == "moe":
        return None
    found = block.linear_fc2 if kind == "mlp" else block.linear_proj
    assert isinstance(found, RowParallelLinear)
    return found


class Residual:
    """``x + dropout(y)``: the rule by which a block's output joins the stream, in its dtype.

    Where that is one kernel, it also adds the bias of the block's ``last`` layer, where there is
    one that gives the output.
    """

    def __init__(
        self, place: str, probability: float, last: RowParallelLinear | None, around: Surroundings
    ) -> None:
        self.place, self.probability = place, probability
        self.add = around.backends.bias_dropout_add
        if last is not None:
            last.adds_bias = not around.backends.fuses_residual_bias
        # Asked for its bias each time: torch's fully_shard puts other parameters in place.
        self.last = last
        # With sequence parallelism each rank drops its own tokens; else all ranks drop alike.
        self.split = (around.mesh.tp.coordinate,) if around.sequence_parallel else ()

    def __call__(self, x_SBH: Tensor, y_SBH: Tensor, context: Context) -> Tensor:
        p, seed = 0.0, 0
        if self.probability and context.dropout is not None:
            p, seed = self.probability, context.dropout.at(self.place, *self.split)
        bias_H = None if self.last is None or self.last.adds_bias else self.last.bias
        # The sum of an fp32 stream and a half is fp32.
        return self.add(y_SBH, bias_H, x_SBH, p, seed)


class TransformerLayer(nn.Module):
    """The sub-layers of one plan entry, registered under the plan's names."""

    def __init__(self, plan: LayerPlan, around: Surroundings) -> None:
        super().__init__()
        self.sublayers: list[_Sublayer] = []
        for part in plan.sublayers:
            norm = build_norm(around)
            block = build_block(part.kind, plan.number, around)
            place = f"layers.{plan.number}.{part.block_name}.residual"
            last = last_linear(part.kind, block)
            residual = Residual(place, around.config.hidden_dropout, last, around)
            self.add_module(part.norm_name, norm)
            self.add_module(part.block_name, block)
            self.sublayers.append(_Sublayer(part.kind, norm, block, residual, around.saving))

    def forward(self, x_SBH: Tensor, context: Context) -> Tensor:
        for sublayer in self.sublayers:
            x_SBH = sublayer(x_SBH, context)
        return x_SBH


class _Sublayer:
    """A norm, a block and how its output joins the stream; the layer holds the modules."""

    def __init__(
        self, kind: BlockKind, norm: Norm, block: nn.Module, residual: Residual, saving: Saving
    ) -> None:
        self.norm, self.block, self.residual = norm, block, residual
        is_channel_block = kind in ("mlp", "moe")
        moved = "mlp_norm" if is_channel_block else "attn_norm"
        self.lend: Lender = saving.lender(norm, recomputed="layernorm", offloaded=moved)
        self.run: Runner = saving.runner(block, recomputed=kind if is_channel_block else None)

    def __call__(self, x_SBH: Tensor, context: Context) -> Tensor:
        with self.lend(self.norm, x_SBH) as normed_SBH:
            y_SBH = self.run(partial(self.block, context=context), normed_SBH)
        return self.residual(x_SBH, y_SBH, context)
