"""Flat buffers: the parameters and gradients of a model, each kind in one piece of memory.

Parameters with equal (dtype, axes their gradient is summed over) share a `FlatBuffer`; their data
and their gradients become views of it. Autograd adds to an existing ``grad`` in place, and our own
layers do too, so gradients accumulate in the buffer, in at least fp32, also for bf16 parameters.
Collectives then reduce a buffer bucket by bucket, and the optimizer updates a contiguous range in a
few calls.

Two things must not happen to a parameter that lies in a buffer: ``parameter.grad`` set to anything
else (`FlatBuffer.zero_grad` puts the view back), and ``parameter.data`` replaced.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from megatron.core import sharding
from megatron.core.distributed import layout
from megatron.core.distributed.layout import BufferPlan, Item, Range
from megatron.core.mesh import Mesh
from megatron.core.sharding import Sharding
from megatron.core.utils import UserError

GroupOf = Callable[[Sharding], str]
"""Gives the optimizer group of a parameter."""


class FlatBuffer:
    """One flat piece of parameters and one of their gradients."""

    data: Tensor
    grad: Tensor
    summed: tuple[str, ...]
    """Model-parallel axes that some region's gradient is summed over."""
    is_tied: bool
    """Another stage holds a copy of its one parameter."""
    data_axis: str = "dp_cp"
    """Axis of the replicas, which every gradient is summed over."""

    def __init__(
        self, plan: BufferPlan, parameters: Iterable[nn.Parameter], grad_dtype: torch.dtype
    ) -> None:
        self.plan = plan
        everyone = list(parameters)
        self.parameters = tuple(everyone[slot.index] for slot in plan.slots)
        first = self.parameters[0]
        self.summed = summed_axes(sharding.of(first))
        self.is_tied = sharding.of(first).tied
        self.data = torch.zeros(plan.size, dtype=first.dtype, device=first.device)
        self.grad = torch.zeros(plan.size, dtype=grad_dtype, device=first.device)
        self._grad_views = [self._view(self.grad, i) for i in range(len(self.parameters))]
        for i, parameter in enumerate(self.parameters):
            view = self._view(self.data, i)
            view.copy_(parameter.detach())
            parameter.data = view
            _allow_grad_dtype(parameter, grad_dtype)
            parameter.grad = self._grad_views[i]

    def _view(self, flat: Tensor, i: int) -> Tensor:
        slot = self.plan.slots[i]
        return flat[slot.start : slot.stop].view(self.parameters[i].shape)

    def zero_grad(self) -> None:
        """Set every gradient to zero, and every ``parameter.grad`` to its view of the buffer."""
        self.grad.zero_()
        for parameter, view in zip(self.parameters, self._grad_views, strict=True):
            if parameter.grad is not view:
                parameter.grad = view

    def check_gradients(self) -> None:
        """Assert that nobody has put other gradients in place of the buffer's."""
        for parameter, view in zip(self.parameters, self._grad_views, strict=True):
            assert parameter.grad is view, (
                f"the gradient of {sharding.of(parameter).name} left its buffer; use the "
                "optimizer's zero_grad() and never set .grad"
            )

    @property
    def spans(self) -> list[Range]:
        """Return the ranges whose gradients are whole here once reduced, and are updated here."""
        return [(0, self.plan.size)]

    @property
    def weight_pieces(self) -> list[Tensor]:
        """Return the weights in `spans`."""
        return [self.data[start:stop] for start, stop in self.spans]

    @property
    def grad_pieces(self) -> list[Tensor]:
        """Return the gradients in `spans`."""
        return [self.grad[start:stop] for start, stop in self.spans]

    def owned_ranges(self, mesh: Mesh) -> list[Range]:
        """Return the ranges of the elements that this rank answers for in sums over the world.

        Each logical element is answered for once: rows that only pad a vocabulary, what another
        rank owns and what another replica counts are left out.
        """
        if mesh[self.data_axis].coordinate > 0:
            return []
        coordinates = {axis.name: axis.coordinate for axis in mesh.axes.values()}
        ranges = []
        for slot, parameter in zip(self.plan.slots, self.parameters, strict=True):
            mine = []
            for region in sharding.of(parameter).owned(coordinates):
                for start, stop in layout.box_ranges(parameter.shape, region.local):
                    mine.append((slot.start + start, slot.start + stop))
            ranges += layout.merge(sorted(mine))
        return ranges


def _allow_grad_dtype(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Let ``parameter`` have a gradient of another dtype than its own."""
    if parameter.dtype == dtype:
        return
    if not hasattr(parameter, "grad_dtype"):
        raise UserError(
            f"this torch ({torch.__version__}) cannot keep {dtype} gradients of {parameter.dtype} "
            "parameters; --bf16 needs a torch whose tensors have grad_dtype, such as 2.13"
        )
    parameter.grad_dtype = dtype


def summed_axes(record: Sharding) -> tuple[str, ...]:
    """Return the axes that some region of a parameter is summed over."""
    return tuple(sorted({axis for region in record.regions for axis in region.summed}))


def build_buffers(
    parameters: Iterable[nn.Parameter],
    grad_dtype: torch.dtype,
    *,
    group_of: GroupOf,
    data_size: int = 1,
    bucket_size: int | None = None,
    apart: frozenset[int] = frozenset(),
) -> list[FlatBuffer]:
    """Move ``parameters`` into flat buffers and give each a gradient of zeros.

    Values are kept. A tied parameter gets a buffer of its own, since its gradient is summed with
    that of its twin on another stage; so do those whose ids are in ``apart``.
    """
    everyone = list(parameters)
    items = []
    for parameter in everyone:
        record = sharding.of(parameter)
        alone = record.tied or id(parameter) in apart
        key = (parameter.dtype, summed_axes(record), record.name if alone else "")
        items.append(Item(record.name, parameter.numel(), key, group_of(record)))
    plans = layout.plan_buffers(items, data_size, bucket_size)
    return [FlatBuffer(plan, everyone, grad_dtype) for plan in plans]
