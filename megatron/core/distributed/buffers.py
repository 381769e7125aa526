"""Flat buffers: the parameters and gradients of a model, each kind in one piece of memory.

Parameters with equal (dtype, axes their gradient is summed over) share a `FlatBuffer`; their data
and their gradients become views of it. Autograd adds to an existing ``grad`` in place, and our own
layers do too, so gradients accumulate in the buffer, in at least fp32, also for bf16 parameters.
Collectives then reduce a buffer bucket by bucket, and the optimizer updates what this rank has of
it (`pieces.Pieces`) in a few calls.

`pieces.Shares` says what replicas share out. What is shared out is kept in memory of its own, as
large as this rank's share, and the buffer's storage is there only while somebody needs all of it:

    no_shard             weights, gradients: whole; this rank updates all
    optim                weights, gradients: whole; this rank updates its share of each bucket
    optim_grads          gradients: a share, and all of them while a backward adds to them
    optim_grads_params   weights too: a share, and all of them while a unit computes

A storage is emptied and filled again under its tensors, so parameters and their gradients stay the
same objects all along. Nothing notices a read of an empty one, hence the assertions in layers
(`sharding.is_there`).

Two things must not happen to a parameter that lies in a buffer: ``parameter.grad`` set to anything
else (`FlatBuffer.zero_grad` puts the view back), and ``parameter.data`` replaced.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from megatron.core import held, sharding
from megatron.core.distributed import layout
from megatron.core.distributed.layout import BufferPlan, Item
from megatron.core.distributed.pieces import Fill, GroupOf, Pieces, Shares, summed_axes
from megatron.core.utils import UserError


class FlatBuffer(Pieces):
    """One flat piece of parameters and one of their gradients."""

    data: Tensor
    """All weights; its storage is empty at times where weights are shared out."""
    grad: Tensor
    """All gradients of this rank's samples, likewise."""

    def __init__(
        self,
        plan: BufferPlan,
        parameters: Iterable[nn.Parameter],
        grad_dtype: torch.dtype,
        shares: Shares,
        fill: Fill | None = None,
    ) -> None:
        super().__init__(plan, list(parameters), shares)
        first = self.parameters[0]
        self.data = torch.zeros(plan.size, dtype=first.dtype, device=first.device)
        self.grad = torch.zeros(plan.size, dtype=grad_dtype, device=first.device)
        self._grad_views = [self._view(self.grad, i) for i in range(len(self.parameters))]
        for i, parameter in enumerate(self.parameters):
            view = self._view(self.data, i)
            has_values = sharding.is_there(parameter)
            if has_values:
                view.copy_(parameter.detach())
            parameter.data = view
            if not has_values:
                assert fill is not None, "a parameter has no memory, and nobody fills it"
                fill(parameter)
            _allow_grad_dtype(parameter, grad_dtype)
            parameter.grad = self._grad_views[i]
        self.weight_pieces = self._pieces(self.data, shares.weights)
        self.grad_pieces = self._pieces(self.grad, shares.gradients)
        for flat in [self.data] * shares.weights + [self.grad] * shares.gradients:
            flat.untyped_storage().resize_(0)

    def _view(self, flat: Tensor, i: int) -> Tensor:
        slot = self.plan.slots[i]
        return flat[slot.start : slot.stop].view(self.parameters[i].shape)

    def _pieces(self, flat: Tensor, apart: bool) -> list[Tensor]:
        """Return what `spans` hold of ``flat``: views, or a copy in one piece of memory."""
        views = [flat[start:stop] for start, stop in self.spans]
        return list(torch.cat(views).split([len(view) for view in views])) if apart else views

    def held(self) -> dict[str, int]:
        mine, all_of_them = super().held(), {"weights": self.data, "gradients": self.grad}
        shared = {"weights": self.shares.weights, "gradients": self.shares.gradients}
        return {name: mine[name] if shared[name] else all_of_them[name].nbytes for name in mine}

    def zero_grad(self) -> None:
        """Set every gradient to zero, and every ``parameter.grad`` to its view of the buffer."""
        if self.shares.gradients:
            self.drop_grad()
            for piece in self.grad_pieces:
                piece.zero_()
        else:
            self.grad.zero_()
        for parameter, view in zip(self.parameters, self._grad_views, strict=True):
            if parameter.grad is not view:
                parameter.grad = view

    def take_grad(self) -> None:
        """Have memory for all gradients, zeros if there was none."""
        if not sharding.is_there(self.grad):
            _fill(self.grad)
            self.grad.zero_()

    def drop_grad(self) -> None:
        """Give the memory of all gradients back, where they are shared out."""
        if self.shares.gradients:
            _empty(self.grad)

    def take_data(self) -> None:
        """Have memory for all weights; what it holds is for `weight_pieces` of all ranks to say."""
        if not sharding.is_there(self.data):
            _fill(self.data)

    def drop_data(self) -> None:
        """Give the memory of all weights back, where they are shared out."""
        if self.shares.weights:
            _empty(self.data)

    def check_gradients(self) -> None:
        """Assert that nobody has put other gradients in place of the buffer's."""
        for parameter, view in zip(self.parameters, self._grad_views, strict=True):
            assert parameter.grad is view, (
                f"the gradient of {sharding.of(parameter).name} left its buffer; use the "
                "optimizer's zero_grad() and never set .grad"
            )


def _empty(flat: Tensor) -> None:
    if sharding.is_there(flat):
        flat.untyped_storage().resize_(0)
        held.change(-flat.nbytes)


def _fill(flat: Tensor) -> None:
    flat.untyped_storage().resize_(flat.nbytes)
    held.change(flat.nbytes)


def _allow_grad_dtype(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Let ``parameter`` have a gradient of another dtype than its own."""
    if parameter.dtype == dtype:
        return
    if not hasattr(parameter, "grad_dtype"):
        raise UserError(
            f"this torch ({torch.__version__}) cannot keep {dtype} gradients of {parameter.dtype} "
            "parameters; --bf16 and --fp16 need a torch whose tensors have grad_dtype, such as "
            "2.13, or --no-accumulate-allreduce-grads-in-fp32"
        )
    parameter.grad_dtype = dtype


def build_buffers(
    parameters: Iterable[nn.Parameter],
    grad_dtype: torch.dtype,
    *,
    group_of: GroupOf,
    shares: Shares,
    expert_shares: Shares | None = None,
    bucket_size: int | None = None,
    apart: frozenset[int] = frozenset(),
    fill: Fill | None = None,
) -> list[FlatBuffer]:
    """Move ``parameters`` into flat buffers and give each a gradient of zeros.

    Values are kept; ``fill`` draws those of parameters without memory. A tied parameter gets a
    buffer of its own, since its gradient is summed with that of its twin on another stage; so do
    those whose ids are in ``apart``. Where gradients are shared out, each unit of the model has
    buffers of its own. Buffers of experts, who have replicas of their own, come last.
    """
    everyone = list(parameters)
    found = []
    for experts, shared in ((False, shares), (True, expert_shares)):
        mine = [p for p in everyone if sharding.of(p).expert == experts]
        if not mine:
            continue
        assert shared is not None, "experts, and nobody said what their replicas share out"
        items = []
        for parameter in mine:
            record = sharding.of(parameter)
            alone = record.tied or id(parameter) in apart
            key = (
                parameter.dtype,
                summed_axes(record),
                record.name if alone else "",
                layout.unit_of(record.name) if shares.gradients else "",
            )
            items.append(Item(record.name, parameter.numel(), key, group_of(record)))
        # Buckets divide over all replicas, whatever is shared out.
        plans = layout.plan_buffers(items, shared.replicas, bucket_size, shares=shared.axis.size)
        found += [FlatBuffer(plan, mine, grad_dtype, shared, fill) for plan in plans]
    return found
