"""Which sample stands at each position of a run.

A run reads positions 0, 1, 2, ... of one list, however many processes share the reading: all that
a resume needs is how many positions were consumed. ``single`` reads a data set front to back (it
is shuffled already); ``cyclic`` goes round it as long as the run lasts, each time in another order.

The cyclic order is Megatron's for one replica, and for several the samples of each step are those
of Megatron's sampler without data sharding: a permutation seeded by the number of the pass, over
whole microbatches, of which a pass uses whole steps of all replicas.
"""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from megatron.core.utils import UserError

Order = Callable[[int], int]
"""Position in the run -> sample number."""

Permutation = Callable[[int, int], npt.NDArray[Any]]
"""(length, seed) -> a permutation of range(length)."""


def torch_permutation(length: int, seed: int) -> npt.NDArray[np.int64]:
    """Return torch's random permutation, which Megatron's cyclic order is made of."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    permutation: npt.NDArray[np.int64] = torch.randperm(length, generator=generator).numpy()
    return permutation


def sample_order(
    kind: Literal["single", "cyclic"],
    length: int,
    needed: int,
    *,
    micro_batch_size: int,
    data_parallel_size: int,
    permutation: Permutation = torch_permutation,
) -> Order:
    """Return the order in which a run of ``needed`` samples reads a data set of ``length``.

    Raises:
        UserError: the data set is too short for the run.
    """
    if kind == "cyclic":
        return Cyclic(length, micro_batch_size, data_parallel_size, permutation)
    if needed > length:
        raise UserError(
            f"the run takes {needed} training samples, but the blend of corpora by size gives "
            f"{length}: give the corpora weights (WEIGHT PREFIX ...) so that they repeat, shorten "
            "the run, or use --dataloader-type cyclic"
        )
    return single


def single(position: int) -> int:
    """Return the sample at ``position``: the order is the data set's own."""
    return position


class Cyclic:
    """Passes over a data set, each in an order of its own."""

    def __init__(
        self,
        length: int,
        micro_batch_size: int,
        data_parallel_size: int,
        permutation: Permutation = torch_permutation,
    ) -> None:
        self._permuted = length // micro_batch_size * micro_batch_size
        step = micro_batch_size * data_parallel_size
        self.samples_per_pass = length // step * step
        if not self.samples_per_pass:
            raise UserError(
                f"the training data has {length} samples, fewer than the {step} that "
                f"{data_parallel_size} replicas of --micro-batch-size {micro_batch_size} take"
            )
        self._permutation = permutation
        self._pass = -1
        self._order: npt.NDArray[Any] = np.empty(0, dtype=np.int64)

    def __call__(self, position: int) -> int:
        number, place = divmod(position, self.samples_per_pass)
        if number != self._pass:
            self._order = self._permutation(self._permuted, number)
            self._pass = number
        return int(self._order[place])
