"""The implementations of a model's ops, chosen once when it is built."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.core.kernels import routing, table
from megatron.core.kernels.attention import AttentionFunction
from megatron.core.kernels.cross_entropy import Kernels
from megatron.core.kernels.grouped import LOOP, WIDTHS, GroupedProducts
from megatron.core.kernels.norm import WIDEST_FUSED
from megatron.core.kernels.permute import REFERENCE, Moves
from megatron.core.kernels.routing import Routes
from megatron.core.transformer.config import TransformerConfig
from megatron.core.utils import UserError


@dataclass(frozen=True)
class Backends:
    """One callable per op; signatures are those of the references in `megatron.core.kernels`."""

    attention: AttentionFunction
    layer_norm: Callable[..., Tensor]
    rms_norm: Callable[..., Tensor]
    rope: Callable[..., Tensor]
    activation: Callable[..., Tensor]
    """The one of the model's feed-forward blocks."""
    bias_dropout_add: Callable[..., Tensor]
    grouped_products: GroupedProducts
    """Of experts."""
    permute: Moves
    """Of tokens, sorted by expert."""
    routing: Routes
    """Of tokens to experts."""
    cross_entropy: Kernels | Callable[..., Tensor]
    names: dict[str, str]
    """Op -> backend, for the start-up log."""
    asked: dict[str, str]
    """Op -> backend as flags name it."""
    unfit: dict[str, dict[str, str]]
    """Op -> backends that this model cannot use, with the reason."""
    fuses_activation_bias: bool
    """The activation adds the bias before it, and sums its gradient, in the same pass."""
    fuses_residual_bias: bool
    """So does the sum with the residual stream."""


def choose_backends(
    config: TransformerConfig, device: torch.device, dtype: torch.dtype, expert_cuts: int = 1
) -> Backends:
    """Return the backends that the config asks for.

    Args:
        config: of the model.
        device: where it is.
        dtype: of its activations.
        expert_cuts: ways in which the inner width of an expert is cut.

    Raises:
        UserError: one that is asked for by name is not there.
    """
    wanted, unfit = wanted_backends(config), unfit_backends(config, expert_cuts)
    names = {}
    for op, backend in wanted.items():
        try:
            names[op] = table.choose(op, backend, device, dtype, unfit.get(op, {}))
        except UserError as error:
            raise UserError(f"{error}{_way_out(config, op)}") from None
    chosen: dict[str, Any] = {
        op: table.select(op, name, device, dtype) for op, name in names.items()
    }
    activation, mlp = config.mlp.activation, config.mlp
    function = chosen.pop(activation)
    if mlp.has_bounds:
        bounds = {"clamp": mlp.activation_func_clamp_value, "offset": mlp.glu_linear_offset}
        function = partial(function, **bounds)
    return Backends(
        activation=function,
        grouped_products=chosen.pop("grouped_products", LOOP),
        permute=chosen.pop("permute", REFERENCE),
        routing=chosen.pop("routing", routing.REFERENCE),
        **chosen,
        names=names,
        asked=wanted,
        unfit={op: unfit.get(op, {}) for op in names},
        fuses_activation_bias=names[activation] == "triton",
        fuses_residual_bias=names["bias_dropout_add"] == "triton",
    )


def _way_out(config: TransformerConfig, op: str) -> str:
    if op == "cross_entropy":
        return "; or choose --cross-entropy-fusion-impl native"
    if op != "attention" and config.transformer_impl in table.PACKAGES:
        return "; or choose --transformer-impl local"
    return ""


def wanted_backends(config: TransformerConfig) -> dict[str, str]:
    """Return op -> backend as the flags name them, ``auto`` for the best there is.

    Raises:
        UserError: a package is asked for that is not there.
    """
    fusion, package = config.fusion, table.general_backend(config.transformer_impl)

    def general(op: str, fused: bool = True, separate: str = "reference") -> str:
        """Return the package's, if it has the op; else the best one, or one that is not fused."""
        if package in table.TABLE[op]:
            return package
        return "auto" if fused else separate

    activation = config.mlp.activation
    act_fused = config.mlp.bias_gelu_fusion if activation.startswith("gelu") else True
    if config.mlp.is_gated:
        act_fused = fusion.bias_swiglu_fusion
    experts = {}
    if config.moe.num_experts is not None:
        experts["grouped_products"] = "auto" if config.moe.moe_grouped_gemm else "reference"
        experts["permute"] = "auto" if config.moe.moe_permute_fusion else "reference"
        experts["routing"] = "auto" if config.router.moe_router_fusion else "reference"
    return {
        "attention": table.attention_backend(
            config.attention_backend, fusion.masked_softmax_fusion
        ),
        "layer_norm": general("layer_norm", fusion.persist_layer_norm, "torch"),
        "rms_norm": general("rms_norm", fusion.persist_layer_norm, "torch"),
        "rope": general("rope", fusion.rope_fusion),
        activation: general(activation, act_fused),
        "bias_dropout_add": general("bias_dropout_add", fusion.bias_dropout_fusion, "torch"),
        "cross_entropy": _cross_entropy(config),
        **experts,
    }


def _cross_entropy(config: TransformerConfig) -> str:
    if not config.fusion.cross_entropy_loss_fusion:
        return "in_place_half" if config.fp16_lm_cross_entropy else "unfused"
    return "auto" if config.fusion.cross_entropy_fusion_impl == "native" else "transformer_engine"


def unfit_backends(config: TransformerConfig, expert_cuts: int = 1) -> dict[str, dict[str, str]]:
    """Return op -> backends that lack what this model asks of the op, with the reason."""
    unfit: dict[str, dict[str, str]] = {
        op: {} for op in ("attention", "layer_norm", "rms_norm", "cross_entropy")
    }
    unfit["routing"] = _unfit_for_routing(config)
    unfit["grouped_products"] = _unfit_for_experts(config, expert_cuts)
    if config.attention.softmax_type != "vanilla":
        kind = config.attention.softmax_type
        reason = f"it has no extra logit (--softmax-type {kind})"
        unfit["attention"] = {"flash_attn": reason, "triton_softmax": reason}
    if config.has_two_stacks:
        unfit["attention"]["flash_attn"] = "it does not know which keys are padding"
    if config.mlp.has_bounds:
        reason = "it has no bounds (--activation-func-clamp-value, --glu-linear-offset)"
        unfit["swiglu"] = {"transformer_engine": reason}
    if config.mla.multi_latent_attention and config.mla.v_head_dim != config.mla.query_size:
        unfit["attention"]["flash_attn"] = (
            f"its values have as many channels as its keys, not --v-head-dim "
            f"({config.mla.v_head_dim}) beside --qk-head-dim + --qk-pos-emb-head-dim "
            f"({config.mla.query_size})"
        )
    if config.hidden_size > WIDEST_FUSED:
        reason = f"rows of up to {WIDEST_FUSED} fit it, not --hidden-size {config.hidden_size}"
        unfit["layer_norm"]["triton"] = unfit["rms_norm"]["triton"] = reason
    if config.fp32_residual_connection:
        reason = "its gains have the dtype of its input (--fp32-residual-connection)"
        unfit["layer_norm"]["transformer_engine"] = unfit["rms_norm"]["transformer_engine"] = reason
    if config.attention.qk_l2_norm:
        unfit["rms_norm"]["transformer_engine"] = "it has no norm without gains (--qk-l2-norm)"
    if config.label_smoothing:
        unfit["cross_entropy"]["transformer_engine"] = (
            f"it smooths over padding too (--label-smoothing {config.label_smoothing})"
        )
    # Of two that differ in what they keep, the one that was asked for.
    half = config.fp16_lm_cross_entropy
    passed_over, reason = (
        ("in_place", "it widens the logits (--fp16-lm-cross-entropy)")
        if half
        else ("in_place_half", "it is what --fp16-lm-cross-entropy asks for")
    )
    unfit["cross_entropy"][passed_over] = reason
    return unfit


def _unfit_for_experts(config: TransformerConfig, cuts: int) -> dict[str, str]:
    if config.moe.num_experts is None or not config.moe.moe_grouped_gemm:
        return {}
    latent, inner = config.moe.moe_latent_size, config.moe.moe_ffn_hidden_size
    outer = "--hidden-size" if latent is None else "--moe-latent-size"
    share = f"--moe-ffn-hidden-size {inner}"
    share += f" / --expert-tensor-parallel-size {cuts}" if cuts > 1 else ""
    # A gated unit's first matrices have two shares, so that they fit where one does.
    widths = {f"{outer} {config.routed_size}": config.routed_size, share: inner // cuts}
    odd = [name for name, width in widths.items() if width % WIDTHS]
    if not odd:
        return {}
    return {"torch": f"its widths are multiples of {WIDTHS}, unlike {' and '.join(odd)}"}


def _unfit_for_routing(config: TransformerConfig) -> dict[str, str]:
    experts, most = config.moe.num_experts or 0, routing.WIDEST_FUSED
    if config.router.moe_router_dtype == "fp64":
        return {"triton": "its kernels count in fp32 (--moe-router-dtype fp64)"}
    if experts > most:
        return {"triton": f"{most} experts fit it, not --num-experts {experts}"}
    return {}
