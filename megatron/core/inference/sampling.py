"""How the next token is chosen from its logits.

Shapes: V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.utils import UserError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Temperature, then the best ``top_k``, then the smallest set of ``top_p`` probability."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the most probable token."""
    top_k: int = 0
    """Keep this many tokens; 0 keeps all, 1 is greedy."""
    top_p: float = 0.0
    """Keep the most probable tokens that together reach this probability; 0 keeps all."""

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise UserError(f"--temperature ({self.temperature}) must not be negative")
        if self.top_k < 0:
            raise UserError(f"--top-k ({self.top_k}) must not be negative; 0 keeps every token")
        if not 0.0 <= self.top_p <= 1.0:
            raise UserError(f"--top-p ({self.top_p}) must lie in [0, 1]; 0 keeps every token")

    @property
    def is_greedy(self) -> bool:
        """The most probable token is taken."""
        return self.temperature == 0 or self.top_k == 1


def probabilities(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """Return what a token is drawn from; tokens that are cut off have probability 0."""
    if sampling.is_greedy:
        return torch.zeros_like(logits_V).index_fill_(0, logits_V.argmax(), 1.0)
    scaled_V = logits_V / sampling.temperature
    if 0 < sampling.top_k < len(scaled_V):
        # By rank, not by value: ties must not let more than k through.
        kept = scaled_V.topk(sampling.top_k).indices
        scaled_V = torch.full_like(scaled_V, -torch.inf).index_copy_(0, kept, scaled_V[kept])
    chances_V = scaled_V.softmax(0)
    if 0.0 < sampling.top_p < 1.0:
        ordered_V, order_V = chances_V.sort(descending=True, stable=True)
        # A token stays while those before it have not reached top_p; the first always stays.
        dropped_V = order_V[ordered_V.cumsum(0) - ordered_V >= sampling.top_p]
        chances_V = chances_V.index_fill(0, dropped_V, 0.0)
        chances_V = chances_V / chances_V.sum()
    return chances_V


def choose(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Return the id of the next token."""
    if sampling.is_greedy:
        return int(logits_V.argmax())
    chances_V = probabilities(logits_V, sampling)
    return int(torch.multinomial(chances_V, 1, generator=generator))
