"""Experts by the id of a token: layers whose router does not look (`--moe-n-hash-layers`).

Shapes: T tokens, K chosen of each.
"""

import math

import torch
from torch import Tensor

from megatron.core import rng
from megatron.core.kernels import philox


def hashed_experts(tokens_T: Tensor, layer: int, num_experts: int, topk: int) -> Tensor:
    """Return the experts of each token by its id alone, experts_TK, int64.

    That is a table of random rows of different experts (Roller et al., 2021, 2106.04426), which
    nothing but the layer's number and the number of experts decides. A row is computed when it is
    needed, by double hashing: from a first expert on in steps that share no divisor with the number
    of experts, both drawn by the token's id.

    Args:
        tokens_T: token ids, int64.
        layer: from 0.
        num_experts: E.
        topk: K, at most E.
    """
    steps = [n for n in range(1, num_experts) if math.gcd(n, num_experts) == 1]
    # Without waiting for all that the device has under way.
    steps_X = torch.tensor(steps or [1]).to(tokens_T.device, non_blocking=True)
    zero_T = torch.zeros_like(tokens_T)
    first_T, second_T, *_ = philox.philox(
        (tokens_T & philox.WORD, tokens_T >> 32, zero_T, zero_T), rng.key("hash layer", layer)
    )
    step_T = steps_X[second_T % len(steps_X)]
    number_K = torch.arange(topk, device=tokens_T.device)
    return (first_T[:, None] + step_T[:, None] * number_K) % num_experts
