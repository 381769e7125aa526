"""One parameter's share of weights, masters or optimizer states, as a checkpoint takes it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.distributed.pieces import Member
from megatron.core.optimizer.scaled import Scaled
from megatron.core.sharding import Sharding


@dataclass(frozen=True)
class StateTensor:
    """One parameter's share of one kind of optimizer state, for checkpoints."""

    key: str
    """``optimizer.KIND.PARAMETER``, KIND being ``master`` or a state of the update rule, or
    ``model.PARAMETER``."""
    sharding: Sharding
    """Record of the parameter."""
    shape: tuple[int, ...]
    """Local shape of the parameter."""
    start: int
    stop: int
    """Range of the flattened local parameter that `tensor` holds."""
    tensor: Tensor
    """One-dimensional view: to load is to copy into it. Of numbers that have scales an fp32 tensor
    without memory (``meta``), which stands for `coded`."""
    coded: Scaled | None = None

    def values(self) -> Tensor:
        """Return the numbers: `tensor`, or a copy in fp32."""
        return self.tensor if self.coded is None else self.coded.to(torch.float32)

    def fill(self, values: Tensor) -> None:
        """Set the numbers."""
        (self.tensor if self.coded is None else self.coded).copy_(values)


def state_of(kind: str, member: Member, kept: Tensor | Scaled) -> StateTensor:
    """Return what a member has of one kind under the key of that."""
    if isinstance(kept, Scaled):
        tensor, coded = torch.empty(kept.numel(), dtype=torch.float32, device="meta"), kept
    else:
        tensor, coded = kept, None
    return StateTensor(
        key=f"{kind}.{member.record.name}",
        sharding=member.record,
        shape=member.shape,
        start=member.start,
        stop=member.stop,
        tensor=tensor,
        coded=coded,
    )
