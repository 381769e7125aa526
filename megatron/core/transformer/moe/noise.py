"""Random numbers of a router that no layout changes: each belongs to a token and a channel.

They are keyed by seed, place, iteration and microbatch, as masks of dropout are, but by no
coordinate of the rank: a token's number in its microbatch takes that place.

Shapes: T tokens of this rank, H hidden, E experts.
"""

import math

import torch
from torch import Tensor

from megatron.core import rng
from megatron.core.kernels import philox
from megatron.core.kernels.dtypes import accumulate_dtype
from megatron.core.rng import DropoutKey


def seed_of(key: DropoutKey | None, place: str) -> int:
    """Return the seed of a place's numbers; without a microbatch's key, one that never changes."""
    if key is None:
        return rng.key("router", place)
    return rng.key("router", place, key.seed, key.iteration, key.microbatch)


def jittered(x_TH: Tensor, tokens_T: Tensor, epsilon: float, seed: int) -> Tensor:
    """Return a router's input times uniform numbers of [1 - epsilon, 1 + epsilon], in its dtype.

    (Fedus et al., 2021, 2101.03961, section 2.4.)

    Args:
        x_TH: the input.
        tokens_T: numbers of the tokens in their microbatch.
        epsilon: below 1.
        seed: of `seed_of`.
    """
    u_TH = philox.uniform(tokens_T, x_TH.shape[1], seed).to(accumulate_dtype(x_TH.dtype))
    return (x_TH * (1.0 + epsilon * (2.0 * u_TH - 1.0))).to(x_TH.dtype)


def random_logits(logits_TE: Tensor, tokens_T: Tensor, seed: int) -> Tensor:
    """Return uniform numbers in place of logits, whose gradient they take.

    On average every expert is chosen alike, while all that is computed of a router still is.
    """
    u_TE = philox.uniform(tokens_T, logits_TE.shape[1], seed).to(logits_TE.dtype)
    return u_TE + (logits_TE - logits_TE.detach())


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
