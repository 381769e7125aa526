"""Linear layers whose weight is cut over the tensor-parallel axis.

`ColumnParallelLinear` cuts output features and needs its whole input; `RowParallelLinear` cuts
input features and sums partial outputs (see `mappings` for the collectives). Both compute their
weight gradient themselves, straight into ``weight.grad`` when that buffer exists, so that no copy
of a gradient is made and microbatches add up in place; the input gradient's collective runs
meanwhile.

Shapes: S sequence, B batch, I input features, O output features; a lower-case letter is this
rank's share.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core import comm, sharding
from megatron.core.kernels import matmul
from megatron.core.mesh import Axis, Mesh
from megatron.core.sharding import Init, Sharding
from megatron.core.tensor_parallel import mappings

GradReady = Callable[[nn.Parameter], None]


class _Linear(torch.autograd.Function):
    """``y = x @ W.T + b`` with the entry collective of a column-parallel layer folded in."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, gathers: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.axis, ctx.gathers = axis, gathers
        # The gathered input is not kept: backward gathers again, so that a rank holds its share.
        return matmul.linear(comm.all_gather(x, axis) if gathers else x, weight, bias)

    @staticmethod
    def backward(
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight, bias = ctx.saved_tensors
        axis, grad = ctx.axis, grads[0].contiguous()
        grad_x = pending = None
        if ctx.needs_input_grad[0]:
            partial = matmul.matmul(grad, weight)
            if ctx.gathers and axis.size > 1:
                grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
                pending = comm.reduce_scatter_into(grad_x, partial, axis, async_op=True)
            else:
                grad_x = partial
                pending = comm.all_reduce(grad_x, axis, async_op=True)
        whole = comm.all_gather(x.contiguous(), axis) if ctx.gathers else x
        grad_weight = _weight_gradient(weight, grad, whole) if ctx.needs_input_grad[1] else None
        grad_bias = None
        if bias is not None and ctx.needs_input_grad[2]:
            grad_bias = accumulate(bias, grad.flatten(0, -2).sum(0))
        if pending is not None:
            pending.wait()
        return grad_x, grad_weight, grad_bias, None, None


def _weight_gradient(weight: Tensor, grad: Tensor, x: Tensor) -> Tensor | None:
    """Add ``grad.T @ x`` to the weight's gradient buffer, or return it when there is none."""
    grad_NO, x_NI = grad.flatten(0, -2), x.flatten(0, -2)
    if weight.grad is None:
        return matmul.matmul(grad_NO.t(), x_NI)
    matmul.accumulate_wgrad(weight.grad, grad_NO, x_NI)
    ready(weight)
    return None


def accumulate(parameter: Tensor, grad: Tensor) -> Tensor | None:
    """Add ``grad`` to the parameter's gradient buffer, or return it when there is none."""
    if parameter.grad is None:
        return grad
    parameter.grad.add_(grad)
    ready(parameter)
    return None


def ready(parameter: Tensor) -> None:
    """Tell whoever reduces gradients that a microbatch's share has been added to this one."""
    notify: GradReady | None = getattr(parameter, "grad_ready", None)
    if notify is not None:
        notify(parameter)  # type: ignore[arg-type]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, gathers: bool) -> Tensor:
    """Return ``x @ weight.T + bias``; the input gradient is summed over ``axis``.

    With ``gathers`` the input is this rank's share of the sequence (dim 0): it is gathered on the
    way in, and its gradient scattered on the way out.
    """
    return _Linear.apply(x, weight, bias, axis, gathers)  # type: ignore[no-any-return]


def make_parameter(
    record: Sharding, local_shape: tuple[int, ...], mesh: Mesh, dtype: torch.dtype
) -> nn.Parameter:
    """Return an uninitialised parameter on the mesh's device that carries ``record``."""
    return sharding.attach(
        nn.Parameter(torch.empty(local_shape, dtype=dtype, device=mesh.device)), record
    )


def bias_record(record: Sharding) -> Sharding:
    """Return the record of the bias that goes with an output-split weight's record."""
    regions = tuple(
        sharding.Region(region.local[:1], region.logical[:1], region.replicated, region.summed)
        for region in record.regions
    )
    return Sharding(record.shape[:1], regions, Init(), decay=False)


class ColumnParallelLinear(nn.Module):
    """``y_SBo = x_SBI @ W_oI.T + b_o``: every rank computes its own output features.

    ``record`` describes the weight, since only the owner knows which rows it holds (gate and up of
    a gated unit, groups of a fused query-key-value matrix).
    """

    def __init__(
        self,
        record: Sharding,
        rows: int,
        mesh: Mesh,
        dtype: torch.dtype,
        *,
        bias: bool = True,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.axis = mesh.tp
        self.gathers = sequence_parallel and mesh.tp.size > 1
        self.weight = make_parameter(record, (rows, record.shape[1]), mesh, dtype)
        self.bias = make_parameter(bias_record(record), (rows,), mesh, dtype) if bias else None

    def forward(self, x_SBI: Tensor) -> Tensor:
        return linear(x_SBI, self.weight, self.bias, self.axis, self.gathers)


class RowParallelLinear(nn.Module):
    """``y_SBO = sum over ranks of x_SBi @ W_Oi.T, + b_O``: every rank holds its input features."""

    def __init__(
        self,
        record: Sharding,
        columns: int,
        mesh: Mesh,
        dtype: torch.dtype,
        *,
        bias: bool = True,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.axis = mesh.tp
        self.sequence_parallel = sequence_parallel and mesh.tp.size > 1
        self.alone = Axis("none", (mesh.rank,), 0, None)
        self.weight = make_parameter(record, (record.shape[0], columns), mesh, dtype)
        # The bias is added once, after the sum; its gradient is partial where the sequence is cut.
        summed = ("tp",) if self.sequence_parallel else ()
        whole = sharding.whole(
            record.shape[:1], Init(), replicated=("tp",), summed=summed, decay=False
        )
        self.bias = make_parameter(whole, record.shape[:1], mesh, dtype) if bias else None

    def forward(self, x_SBi: Tensor) -> Tensor:
        if self.axis.size == 1:
            return linear(x_SBi, self.weight, self.bias, self.axis, False)
        partial = linear(x_SBi, self.weight, None, self.alone, False)
        y_SBO = mappings.leave(partial, self.axis, self.sequence_parallel)
        return y_SBO if self.bias is None else y_SBO + self.bias
