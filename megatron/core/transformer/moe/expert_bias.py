"""Balance without a loss: a bias for each expert, which only the choice of experts sees.

    bias[e] += rate * sign(mean count - count[e])

once per iteration whose gradients the optimizer takes, with the counts of the whole global batch
(Wang et al., 2024, 2408.15664, algorithm 1; DeepSeek-V3, 2412.19437, eq. 16). The bias takes no
gradient: it is a parameter that is not trained, in checkpoints like any weight and in no optimizer.

Shapes: L routers of this rank, E experts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core import comm
from megatron.core.mesh import Axis
from megatron.core.rng import DropoutKey


class Tally:
    """How often the tokens of this rank chose each expert, in one iteration."""

    def __init__(self, num_experts: int, device: torch.device) -> None:
        self.counts_E = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self._iteration: int | None = None
        self._seen: set[int] = set()

    def add(self, key: DropoutKey, counts_E: Tensor) -> None:
        """Add a microbatch's counts, once: a recomputed forward brings them again.

        The first microbatch of an iteration finds nothing of the one before.
        """
        if key.iteration != self._iteration:
            self.clear()
            self._iteration = key.iteration
        if key.microbatch not in self._seen:
            self._seen.add(key.microbatch)
            self.counts_E += counts_E

    def clear(self) -> None:
        """Forget what was counted."""
        self._seen.clear()
        self.counts_E.zero_()


@torch.no_grad()
def update(
    tallies: Sequence[Tally], biases: Sequence[Tensor], axes: Sequence[Axis], rate: float
) -> None:
    """Move every bias towards even loads, and forget the counts.

    A collective of ranks that have the same routers.

    Args:
        tallies: of each router of this rank, in the model's order.
        biases: of the same, [E] each.
        axes: along which ranks saw different tokens: replicas and what shares a microbatch.
        rate: of a step.
    """
    counts_LE = torch.stack([tally.counts_E for tally in tallies])
    for axis in axes:
        comm.all_reduce(counts_LE, axis)
    # Whole numbers, compared without a division.
    ahead_LE = counts_LE.sum(-1, keepdim=True) - counts_LE.shape[1] * counts_LE
    for tally, bias_E, ahead_E in zip(tallies, biases, ahead_LE.sign().unbind(), strict=True):
        bias_E.add_(ahead_E.to(bias_E.dtype), alpha=rate)
        tally.clear()
