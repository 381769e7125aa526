"""Ops of Transformer Engine and Apex, under the signatures of our references.

Not yet proven: no machine of this project has run them. They are written against the packages'
documented interfaces (Transformer Engine 2, `transformer_engine.pytorch`; Apex,
`apex.normalization.fused_layer_norm`), and tested with stand-ins for these. Only operations are
used, nothing that splits a tensor over ranks or owns a parameter.

Shapes: N rows (every leading dim), H hidden; S sequence, B batch, v this rank's logits.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from megatron.core.kernels.probe import INSTALL, missing


def _why_not(package: str, title: str, device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"{title} needs a CUDA device, this is {device.type}"
    reason = missing(package)
    return None if reason is None else f"{reason}; {INSTALL[package]}"


def no_transformer_engine(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why Transformer Engine cannot be used; None when it can."""
    if dtype == torch.float64:
        return "Transformer Engine has no kernels for fp64"
    return _why_not("transformer_engine", "Transformer Engine", device)


def no_apex(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why Apex cannot be used; None when it can."""
    return _why_not("apex", "Apex", device)


def _norm_of_transformer_engine(
    kind: str, x_NH: Tensor, weights: dict[str, Tensor], eps: float, zero_centered: bool
) -> Tensor:
    # Its backward reads the module's own parameters, so a module belongs to one call; made on the
    # meta device it allocates nothing.
    module = getattr(importlib.import_module("transformer_engine.pytorch"), kind)(
        x_NH.shape[-1],
        eps=eps,
        zero_centered_gamma=zero_centered,
        device="meta",
        dtype=x_NH.dtype,
    )
    for name, weight in weights.items():
        setattr(module, name, weight)
    y_NH: Tensor = module(x_NH)
    return y_NH


def layer_norm_of_transformer_engine(
    x_NH: Tensor, weight_H: Tensor, bias_H: Tensor, eps: float, zero_centered: bool = False
) -> Tensor:
    """Return what `norm.layer_norm_reference` returns; the weights must be parameters."""
    weights = {"weight": weight_H, "bias": bias_H}
    return _norm_of_transformer_engine("LayerNorm", x_NH, weights, eps, zero_centered)


def rms_norm_of_transformer_engine(
    x_NH: Tensor, weight_H: Tensor, eps: float, zero_centered: bool = False
) -> Tensor:
    """Return what `norm.rms_norm_reference` returns, with gains, which must be a parameter."""
    return _norm_of_transformer_engine("RMSNorm", x_NH, {"weight": weight_H}, eps, zero_centered)


def swiglu_of_transformer_engine(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return what `activation.swiglu` returns without clamp and offset."""
    ops: Any = importlib.import_module("transformer_engine.pytorch.ops")
    y: Tensor = ops.SwiGLU()(x if bias is None else x + bias)
    return y


def cross_entropy_of_transformer_engine(
    logits_SBv: Tensor, labels_SB: Tensor, group: Any
) -> Tensor:
    """Return the loss of every token, in fp32, over logits that are cut evenly over a group.

    The logits are used up.

    Args:
        logits_SBv: this rank's; -inf for columns that are none.
        labels_SB: int64 ids.
        group: process group of the ranks that share the vocabulary; None for one rank.
    """
    module: Any = importlib.import_module("transformer_engine.pytorch.cross_entropy")
    # label_smoothing, reduce_loss, dist_process_group: an autograd function takes no keywords.
    losses_SB: Tensor = module.parallel_cross_entropy(logits_SBv, labels_SB, 0.0, False, group)
    return losses_SB


def layer_norm_of_apex(
    x_NH: Tensor, weight_H: Tensor, bias_H: Tensor, eps: float, zero_centered: bool = False
) -> Tensor:
    """Return what `norm.layer_norm_reference` returns."""
    module: Any = importlib.import_module("apex.normalization.fused_layer_norm")
    gain_H = weight_H + 1 if zero_centered else weight_H
    y_NH: Tensor = module.fused_layer_norm_affine(x_NH, gain_H, bias_H, weight_H.shape, eps)
    return y_NH


def rms_norm_of_apex(
    x_NH: Tensor, weight_H: Tensor | None, eps: float, zero_centered: bool = False
) -> Tensor:
    """Return what `norm.rms_norm_reference` returns."""
    module: Any = importlib.import_module("apex.normalization.fused_layer_norm")
    if weight_H is None:
        y_NH: Tensor = module.fused_rms_norm(x_NH, x_NH.shape[-1:], eps)
        return y_NH
    gain_H = weight_H + 1 if zero_centered else weight_H
    y_NH = module.fused_rms_norm_affine(x_NH, gain_H, weight_H.shape, eps)
    return y_NH
