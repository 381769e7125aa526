"""One parameter's share of weights, masters or optimizer states, as a checkpoint takes it."""

from dataclasses import dataclass

from torch import Tensor

from megatron.core.distributed.pieces import Member
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
    """One-dimensional view: to load is to copy into it."""


def state_of(kind: str, member: Member, tensor: Tensor) -> StateTensor:
    """Return a member's tensor under the key of its kind."""
    return StateTensor(
        key=f"{kind}.{member.record.name}",
        sharding=member.record,
        shape=member.shape,
        start=member.start,
        stop=member.stop,
        tensor=tensor,
    )
