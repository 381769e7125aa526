"""Attention through the flash-attn package (Dao, 2023), in half precision on CUDA.

Not yet proven: no machine of this project has run it. What the package does not do (sinks, biases,
cached decoding at positions of its own) goes to `sdpa`.

Shapes: S queries, T keys, B batch, n heads, g query groups, D head size.
"""

import importlib
from contextlib import nullcontext

import torch
from torch import Tensor

from megatron.core.kernels.attention import NONE, Extras, Rule
from megatron.core.kernels.probe import INSTALL, missing
from megatron.core.kernels.sdpa import attention_sdpa


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why flash-attn cannot be used for a device and dtype; None when it can."""
    if device.type != "cuda":
        return f"flash-attn needs a CUDA device, this is {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"flash-attn needs --bf16 or --fp16, not {dtype}"
    reason = missing("flash_attn")
    return None if reason is None else f"{reason}; {INSTALL['flash_attn']}"


def attention_flash(
    q_SBnD: Tensor, k_TBgD: Tensor, v_TBgD: Tensor, rule: Rule, extras: Extras = NONE
) -> Tensor:
    """Return what `attention_reference` returns, without sink, bias and padding.

    Cached decoding, whose queries stand anywhere among the keys, is left to `attention_sdpa`.
    """
    lacking = (extras.sink_n, extras.bias, extras.valid_BT)
    assert all(one is None for one in lacking), "another backend is chosen for these"
    if extras.query_positions_BS is not None:
        return attention_sdpa(q_SBnD, k_TBgD, v_TBgD, rule, extras)
    package = importlib.import_module("flash_attn")
    q, k, v = (x.transpose(0, 1) for x in (q_SBnD, k_TBgD, v_TBgD))
    slopes = extras.alibi_slopes_n
    options = {
        "dropout_p": extras.dropout_p,
        "softmax_scale": rule.scale,
        "causal": rule.causal,
        "window_size": rule.window or (-1, -1),
        "softcap": rule.softcap or 0.0,
        "alibi_slopes": None if slopes is None else slopes.to(torch.float32),
        # Torch's switch reaches its own operations alone.
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    scope = extras.dropout_scope if extras.dropout_p > 0 else None
    with scope or nullcontext():
        if extras.packing is None:
            out: Tensor = package.flash_attn_func(q, k, v, **options)
            return out.transpose(0, 1)
        bounds = extras.packing.cu_seqlens.to(torch.int32)
        longest = extras.packing.max_length
        flat = package.flash_attn_varlen_func(
            *(x.flatten(0, 1) for x in (q, k, v)), bounds, bounds, longest, longest, **options
        )
    return flat.unflatten(0, q.shape[:2]).transpose(0, 1)  # type: ignore[no-any-return]
