"""The implementations of a model's ops, chosen once when it is built."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.kernels import table
from megatron.core.kernels.attention import AttentionFunction
from megatron.core.transformer.config import TransformerConfig


@dataclass(frozen=True)
class Backends:
    """One callable per op; signatures are those of the references in `megatron.core.kernels`."""

    attention: AttentionFunction
    layer_norm: Callable[..., Tensor]
    rms_norm: Callable[..., Tensor]
    rope: Callable[..., Tensor]
    names: dict[str, str]
    """Op -> backend, for the start-up log."""
    unfit: dict[str, dict[str, str]]
    """Op -> backends that this model cannot use, with the reason."""


def choose_backends(
    config: TransformerConfig, device: torch.device, dtype: torch.dtype
) -> Backends:
    """Return the backends that the config asks for.

    Raises:
        UserError: one that is asked for by name is not there.
    """
    attention = table.attention_backend(config.attention_backend)
    general = table.general_backend(config.transformer_impl)
    wanted = {"attention": attention, "layer_norm": general, "rms_norm": general, "rope": general}
    unfit: dict[str, dict[str, str]] = {op: {} for op in wanted}
    if config.attention.softmax_type != "vanilla":
        kind = config.attention.softmax_type
        unfit["attention"]["flash_attn"] = f"it has no extra logit (--softmax-type {kind})"
    if config.mla.multi_latent_attention and config.mla.v_head_dim != config.mla.query_size:
        unfit["attention"]["flash_attn"] = (
            f"its values have as many channels as its keys, not --v-head-dim "
            f"({config.mla.v_head_dim}) beside --qk-head-dim + --qk-pos-emb-head-dim "
            f"({config.mla.query_size})"
        )
    names = {
        op: table.choose(op, backend, device, dtype, unfit[op]) for op, backend in wanted.items()
    }
    chosen = {op: table.select(op, backend, device, dtype) for op, backend in names.items()}
    return Backends(**chosen, names=names, unfit=unfit)
