"""The ranks that share a microbatch's tokens, and which of the tokens are this rank's.

Context parallelism cuts a sample's positions over ranks, and sequence parallelism cuts those of a
context-parallel rank once more. What a router computes of a whole microbatch (loads, losses, full
experts) must not depend on these cuts: it is made of sums over the sharers, or of everything they
have, and random numbers are drawn by the number of a token in the microbatch.

Shapes: T tokens of this rank, T' of all sharers, S positions of this rank, B samples.
"""

import torch
from torch import Tensor

from megatron.core import comm
from megatron.core.context_parallel import partition
from megatron.core.mesh import Axis, Mesh
from megatron.core.tensor_parallel import mappings


class Sharers:
    """Those of one rank."""

    def __init__(self, mesh: Mesh, *, sequence_parallel: bool) -> None:
        self.mesh, self.sequence_parallel = mesh, sequence_parallel
        self.axes: tuple[Axis, ...] = (mesh.tp, mesh.cp) if sequence_parallel else (mesh.cp,)
        """Along which ranks see different tokens of one microbatch, the inner one first."""

    @property
    def count(self) -> int:
        """Return how many they are."""
        sizes = [axis.size for axis in self.axes]
        return sizes[0] * sizes[-1] if len(sizes) > 1 else sizes[0]

    def total(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over the sharers, leaving ``x`` as it is.

        The gradient of the sum is that of each rank's own part: what all of them compute from the
        sum is one loss, not one for each.
        """
        for axis in self.axes:
            x = mappings.leave(x, axis, False)
        return x

    @torch.no_grad()
    def everything(self, x_TX: Tensor) -> Tensor:
        """Return what all sharers have, joined along dim 0, without gradients."""
        for axis in self.axes:
            x_TX = comm.all_gather(x_TX.contiguous(), axis)
        return x_TX

    def own(self, x_TX: Tensor) -> Tensor:
        """Return this rank's part of what `everything` returned."""
        for axis in reversed(self.axes):
            x_TX = mappings.own_slice(x_TX, axis)
        return x_TX

    def tokens(self, shape: tuple[int, int], filled: int, device: torch.device) -> Tensor:
        """Return the number of each token in the whole microbatch, position-major, [T], int64.

        Args:
            shape: positions and samples of this rank.
            filled: positions, the last ones of each context-parallel rank, that are no part of the
                microbatch and were added so that the others can be shared out. Their tokens have
                numbers after all others.
            device: of the result.
        """
        positions, samples = shape
        shares = self.mesh.tp.size if self.sequence_parallel else 1
        cp, true = self.mesh.cp, positions * shares - filled
        mine_S = partition.positions(true * cp.size, cp.coordinate, cp.size)
        mine_S = torch.cat((mine_S, true * cp.size + torch.arange(filled)))
        # Without waiting for all that the device has under way.
        mine_S = self.share(mine_S).to(device, non_blocking=True)
        return (mine_S[:, None] * samples + torch.arange(samples, device=device)).flatten()

    def size(self, shape: tuple[int, int], filled: int) -> int:
        """Return how many tokens the whole microbatch has; see `tokens`."""
        return (shape[0] * self.count - filled * self.mesh.cp.size) * shape[1]

    def share(self, x_SX: Tensor) -> Tensor:
        """Return this rank's share of a tensor of its context-parallel rank's positions, dim 0."""
        return mappings.own_slice(x_SX, self.mesh.tp) if self.sequence_parallel else x_SX
