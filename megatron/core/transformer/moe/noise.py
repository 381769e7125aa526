"""Random numbers of a router that no layout changes: each belongs to a token and a channel.

They are keyed by seed, place, iteration and microbatch, as masks of dropout are, but by no
coordinate of the rank: a token's number in its microbatch takes that place.

Shapes: T tokens of this rank, H hidden, E experts.
"""

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
