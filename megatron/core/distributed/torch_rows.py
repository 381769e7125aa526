"""What a rank keeps of parameters that torch has cut by rows, and memory for their gradients.

torch keeps a `DTensor` in the place of each parameter, with this rank's rows and padding:

    parameter   | rows of rank 0 | rows of rank 1 | ... | padding |
    grad        | a view of one flat piece of memory, to which torch adds

torch adds to a gradient that is there, so it is there always.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from megatron.core import sharding
from megatron.core.distributed.layout import BufferPlan, Item
from megatron.core.distributed.pieces import GroupOf, Pieces, Shares, summed_axes
from megatron.core.distributed.rows import plan_rows


def build(
    parameters: Sequence[nn.Parameter], shares: Shares, group_of: GroupOf
) -> list["TorchRows"]:
    """Return what a rank keeps of ``parameters``, which are in the model's order and cut by torch.

    Those whose gradients are summed over the same axes, and that have the same update rule, are
    together.
    """
    items = []
    for parameter in parameters:
        record = sharding.of(parameter)
        key, rows = summed_axes(record), parameter.shape[0]
        items.append(Item(record.name, parameter.numel(), key, group_of(record), rows))
    return [TorchRows(plan, parameters, shares) for plan in plan_rows(items, shares.axis.size)]


class TorchRows(Pieces):
    """Rows of parameters, and their gradients in one flat piece of memory."""

    grad: Tensor
    """All of `grad_pieces`, one after the other."""

    def __init__(
        self, plan: BufferPlan, parameters: Sequence[nn.Parameter], shares: Shares
    ) -> None:
        super().__init__(plan, parameters, shares)
        sizes = [stop - start for start, stop in self.spans]
        self.weight_pieces = list(map(_padded, self.parameters, sizes))
        self.grad = torch.zeros(sum(sizes), dtype=self.dtype, device=self.weight_pieces[0].device)
        self.grad_pieces = list(self.grad.split(sizes))
        self._grads = list(map(_like, self.parameters, self.grad_pieces))
        self.zero_grad()

    def zero_grad(self) -> None:
        """Set every gradient to zero, and every ``parameter.grad`` to its view."""
        self.grad.zero_()
        for parameter, grad in zip(self.parameters, self._grads, strict=True):
            if parameter.grad is not grad:
                parameter.grad = grad

    def check_gradients(self) -> None:
        """Assert that nobody has put other gradients in place of these."""
        for parameter, grad in zip(self.parameters, self._grads, strict=True):
            assert parameter.grad is grad, f"{sharding.of(parameter).name} has another gradient"


def _local(parameter: Tensor) -> Tensor:
    assert isinstance(parameter, DTensor)
    local: Tensor = parameter.to_local()
    return local.detach()


def _padded(parameter: Tensor, size: int) -> Tensor:
    """Return this rank's rows as torch keeps them, one-dimensional, with its padding of zeros."""
    return _local(parameter).as_strided((size,), (1,), 0)


def _like(parameter: Tensor, piece: Tensor) -> DTensor:
    """Return a gradient of a parameter, with its memory in ``piece``."""
    assert isinstance(parameter, DTensor)
    local = _local(parameter)
    return DTensor.from_local(
        piece[: local.numel()].view(local.shape),
        parameter.device_mesh,
        [Shard(0)],
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
