"""What multi-latent attention costs: its parameters and operations.

Pure functions of the architecture, without torch, in the terms of `core.transformer.mla`.
"""

import math
from typing import NamedTuple

from megatron.core.transformer.config import TransformerConfig


class Matrix(NamedTuple):
    """A matrix that a tensor-parallel rank holds."""

    name: str
    shape: tuple[int, int]
    is_whole: bool
    """Every rank holds all of it, and applies it to the positions that it has."""


def projections(model: TransformerConfig, tp: int) -> list[Matrix]:
    """Return the matrices that make queries, keys and values, in the model's order."""
    sizes, hidden = model.mla, model.hidden_size
    heads, rank = model.attention.num_attention_heads // tp, sizes.q_lora_rank
    queries = heads * sizes.query_size
    keys_and_values = heads * (sizes.qk_head_dim + sizes.v_head_dim)
    found = [Matrix("linear_q_proj", (queries, hidden), False)]
    if rank is not None:
        found = [
            Matrix("linear_q_down_proj", (rank, hidden), True),
            Matrix("linear_q_up_proj", (queries, rank), False),
        ]
    return [
        *found,
        Matrix("linear_kv_down_proj", (sizes.down_size, hidden), True),
        Matrix("linear_kv_up_proj", (keys_and_values, sizes.kv_lora_rank), False),
    ]


def latents(model: TransformerConfig) -> dict[str, int]:
    """Return the ranks of the latents by the name of the norm that they may have."""
    sizes = model.mla
    queries = {} if sizes.q_lora_rank is None else {"q_layernorm": sizes.q_lora_rank}
    return {**queries, "kv_layernorm": sizes.kv_lora_rank}


def multiply_adds(
    model: TransformerConfig, seq_length: int, visible_share: float
) -> dict[str, float]:
    """Return the multiply-adds of one layer's attention for a token, by part.

    By Megatron-LM's formula, which counts the latents' gains as well as the matrices. The parts
    have the names of --recompute-modules; ``rest`` is of none.
    """
    sizes, heads = model.mla, model.attention.num_attention_heads
    matrices = projections(model, 1)
    down = sum(math.prod(matrix.shape) for matrix in matrices if matrix.is_whole)
    up = sum(math.prod(matrix.shape) for matrix in matrices if not matrix.is_whole)
    output = heads * sizes.v_head_dim * model.hidden_size
    pairs = heads * (sizes.query_size + sizes.v_head_dim) * seq_length
    return {
        "rest": down + sum(latents(model).values()) + output,
        "mla_up_proj": up,
        "core_attn": pairs * visible_share,
    }
