"""Linear layers whose weight is cut over the tensor-parallel axis.

`ColumnParallelLinear` cuts output features and needs its whole input; `RowParallelLinear` cuts
input features and sums partial outputs (see `mappings` for the collectives). Both compute their
weight gradient themselves, straight into ``weight.grad`` when that buffer exists, so that no copy
of a gradient is made and microbatches add up in place; the input gradient's collective runs
meanwhile.

Shapes: S sequence, B batch, I input features, O output features, N tokens; a lower-case letter is
this rank's share. In the linear op itself all letters are what this rank holds.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core import comm, held, saved_tensors, sharding
from megatron.core.kernels import matmul
from megatron.core.kernels.reused import Reused
from megatron.core.mesh import Axis, Mesh
from megatron.core.sharding import Init, Sharding
from megatron.core.tensor_parallel import mappings, overlap
from megatron.core.utils import divide


class _Tasks(list[Callable[[], Any]]):
    """Weight gradients that are still to be computed."""

    fills_waits = False
    """Whoever waits for other ranks may compute them meanwhile."""


# Innermost last. Of the process, not of a thread: on CUDA autograd runs backwards in its own.
_postponed: list[_Tasks] = []
_without_memory: list[bool] = []


@contextmanager
def postponing(*, fills_waits: bool = False) -> Iterator[list[Callable[[], Any]]]:
    """Collect the weight gradients of backwards in the block, uncomputed, each in a closure.

    Only weights with a gradient buffer may be among them: there is nobody to return one to.

    Args:
        fills_waits: what is collected is computed where the block waits for other ranks
            (`catch_up`); what is left is given as always.
    """
    tasks = _Tasks()
    tasks.fills_waits = fills_waits
    _postponed.append(tasks)
    try:
        yield tasks
    finally:
        innermost = _postponed.pop()  # by identity: empty lists are equal
        assert innermost is tasks


def catch_up() -> None:
    """Compute what is postponed until somebody waits: the caller is about to."""
    if _postponed and _postponed[-1].fills_waits:
        tasks = _postponed[-1]
        while tasks:
            tasks.pop(0)()


def now_or_postponed(
    gradient: Callable[..., Tensor | None], weight: Tensor, *rest: Any
) -> Tensor | None:
    """Compute a weight's gradient, or leave it, with the tensors it takes, to who collects them.

    Args:
        gradient: of ``weight`` and ``rest``: adds to the weight's buffer, or returns the gradient
            where there is none.
        weight: a parameter.
        rest: what else ``gradient`` takes.

    Returns:
        What autograd is to have of it.
    """
    if not _postponed:
        return gradient(weight, *rest)
    assert weight.grad is not None, "a postponed gradient needs a buffer"
    _postponed[-1].append(functools.partial(gradient, weight, *rest))
    for x in rest:
        if isinstance(x, Tensor):
            saved_tensors.see(x)
    return None


class _Linear(torch.autograd.Function):
    """``y = x @ W.T + b`` with the entry collective of a column-parallel layer folded in.

    In backward the collectives run beside the products: the input is gathered again while the
    input's gradient is computed, which is summed while the weight's is.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_SBI: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        axis: Axis,
        gathers: bool,
        memory: Reused | None,
    ) -> Tensor:
        assert sharding.is_there(weight_OI), "a unit of the model was not called as a module"
        ctx.save_for_backward(x_SBI)
        # Not saved as the input is: hooks on saved tensors, such as those of recomputation, give a
        # detached copy back, which has no gradient buffer.
        ctx.weight_OI, ctx.bias_O = weight_OI, bias_O
        ctx.axis, ctx.gathers = axis, gathers
        # The gathered input is not kept: backward gathers again, so that a rank holds its share.
        if gathers and axis.overlap:
            _, y_SBO = overlap.gather_product(x_SBI, weight_OI.t(), axis)
            return y_SBO if bias_O is None else y_SBO.add_(bias_O)
        whole_SBI = comm.all_gather(x_SBI, axis) if gathers else x_SBI
        return matmul.linear(whole_SBI, weight_OI, bias_O, memory)

    @staticmethod
    def backward(
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        # Without its history, through which a postponed closure would hold on to the stage's input.
        x_SBI = ctx.saved_tensors[0].detach()
        weight_OI, bias_O = ctx.weight_OI, ctx.bias_O
        assert sharding.is_there(weight_OI), "the backward came without its unit's weights"
        axis, grad_SBO = ctx.axis, grads[0].contiguous()
        dx_SBI = dw_OI = db_O = pending = None
        whole_SBI, gathering = None if ctx.gathers else x_SBI, None
        if ctx.gathers and ctx.needs_input_grad[1] and not _postponed:
            whole_SBI = x_SBI.new_empty(x_SBI.shape[0] * axis.size, *x_SBI.shape[1:])
            held.see(whole_SBI)
            gathering = comm.all_gather_into(whole_SBI, x_SBI, axis, async_op=True)
        if ctx.needs_input_grad[0] and ctx.gathers and axis.overlap:
            dx_SBI = overlap.product_scatter(grad_SBO, weight_OI, axis)
        elif ctx.needs_input_grad[0]:
            dx_SBI = matmul.matmul(grad_SBO, weight_OI)
            if ctx.gathers:
                partial_SBI, dx_SBI = dx_SBI, x_SBI.new_empty(x_SBI.shape)
                pending = comm.reduce_scatter_into(dx_SBI, partial_SBI, axis, async_op=True)
            else:
                pending = comm.all_reduce(dx_SBI, axis, async_op=True)
        if gathering is not None:
            gathering.wait()
        if ctx.needs_input_grad[1]:
            rest = (grad_SBO, whole_SBI, x_SBI, axis)
            dw_OI = now_or_postponed(_weight_gradient, weight_OI, *rest)
        if bias_O is not None and ctx.needs_input_grad[2]:
            db_O = accumulate(bias_O, grad_SBO.flatten(0, -2).sum(0))
        if pending is not None:
            pending.wait()
        return dx_SBI, dw_OI, db_O, None, None, None


class _RowScatter(torch.autograd.Function):
    """``y_sBO = this rank's share of the sum over ranks of x_SBi @ W_Oi.T``, overlapped."""

    @staticmethod
    def forward(ctx: Any, x_SBi: Tensor, weight_Oi: Tensor, axis: Axis) -> Tensor:
        ctx.save_for_backward(x_SBi)
        ctx.weight_Oi, ctx.axis = weight_Oi, axis
        return overlap.product_scatter(x_SBi, weight_Oi.t(), axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_SBi = ctx.saved_tensors[0].detach()  # as in `_Linear`
        weight_Oi, axis = ctx.weight_Oi, ctx.axis
        grad_SBO, dx_SBi = overlap.gather_product(grads[0], weight_Oi, axis)
        dw_Oi = None
        if ctx.needs_input_grad[1]:
            rest = (grad_SBO, x_SBi, x_SBi, axis)
            dw_Oi = now_or_postponed(_weight_gradient, weight_Oi, *rest)
        return dx_SBi, dw_Oi, None


@torch.no_grad()  # a backward switches it off by itself, whoever runs a postponed closure may not
def _weight_gradient(
    weight_OI: Tensor, grad_SBO: Tensor, whole_SBI: Tensor | None, x_SBI: Tensor, axis: Axis
) -> Tensor | None:
    """Add ``grad.T @ x`` to the weight's gradient buffer, or return it when there is none.

    Without ``whole_SBI``, it is gathered now: a postponed closure keeps no more than its share.
    """
    if whole_SBI is None:
        whole_SBI = comm.all_gather(x_SBI.contiguous(), axis)
    grad_NO, x_NI = grad_SBO.flatten(0, -2), whole_SBI.flatten(0, -2)
    if weight_OI.grad is None:
        return matmul.matmul(grad_NO.t(), x_NI)
    matmul.accumulate_wgrad(weight_OI.grad, grad_NO, x_NI)
    return None


def accumulate(parameter: Tensor, grad: Tensor) -> Tensor | None:
    """Add ``grad`` to the parameter's gradient buffer, or return it when there is none."""
    if parameter.grad is None:
        return grad
    parameter.grad.add_(grad)
    return None


def linear(
    x_SBI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    axis: Axis,
    gathers: bool,
    memory: Reused | None = None,
) -> Tensor:
    """Return ``x @ weight.T + bias``; the input gradient is summed over ``axis``.

    With ``gathers`` the input is this rank's share of the sequence (dim 0): it is gathered on the
    way in, and its gradient scattered on the way out. A large result lies in ``memory``, if any.
    """
    arguments = (x_SBI, weight_OI, bias_O, axis, gathers, memory)
    return _Linear.apply(*arguments)  # type: ignore[no-any-return]


@contextmanager
def without_memory() -> Iterator[None]:
    """Give parameters that are made in the block no memory: who fills them provides it.

    As on the meta device, but a parameter is on its own device from the start, so that it may be
    moved into a buffer and stays the same object.
    """
    _without_memory.append(True)
    try:
        yield
    finally:
        _without_memory.pop()


def make_parameter(
    record: Sharding, local_shape: tuple[int, ...], mesh: Mesh, dtype: torch.dtype
) -> nn.Parameter:
    """Return an uninitialised parameter on the mesh's device that carries ``record``."""
    values = torch.empty(local_shape, dtype=dtype, device=mesh.device)
    if _without_memory:
        values.untyped_storage().resize_(0)
    return sharding.attach(nn.Parameter(values), record)


def bias_record(record: Sharding) -> Sharding:
    """Return the record of the bias that goes with an output-split weight's record."""
    regions = tuple(
        sharding.Region(region.local[:1], region.logical[:1], region.replicated, region.summed)
        for region in record.regions
    )
    return Sharding(record.shape[:1], regions, Init(), decay=False)


class ColumnParallelLinear(nn.Module):
    """``y_SBo = x_SBI @ W_oI.T + b_o``: every rank computes its own output features.

    With ``adds_bias`` false whoever reads the result adds the bias.

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
        self.gathers = sequence_parallel
        self.adds_bias = True
        self.weight = make_parameter(record, (rows, record.shape[1]), mesh, dtype)
        self.bias = make_parameter(bias_record(record), (rows,), mesh, dtype) if bias else None

    @classmethod
    def even(
        cls,
        inputs: int,
        outputs: int,
        mesh: Mesh,
        dtype: torch.dtype,
        init: Init,
        *,
        parts: int = 1,
        bias: bool = True,
        sequence_parallel: bool = False,
    ) -> "ColumnParallelLinear":
        """Return a layer whose output features are cut evenly.

        Of ``parts`` equal blocks of outputs, such as queries, keys and values, every rank gets its
        share of each, one after the other.
        """
        cut = (mesh.tp.coordinate, mesh.tp.size)
        record = sharding.split((outputs, inputs), init, 0, *cut, parts=parts)
        rows = divide(outputs, mesh.tp.size)
        return cls(record, rows, mesh, dtype, bias=bias, sequence_parallel=sequence_parallel)

    def forward(self, x_SBI: Tensor) -> Tensor:
        bias_o = self.bias if self.adds_bias else None
        return linear(x_SBI, self.weight, bias_o, self.axis, self.gathers)


class RowParallelLinear(nn.Module):
    """``y_SBO = sum over ranks of x_SBi @ W_Oi.T, + b_O``: every rank holds its input features.

    With ``adds_bias`` false whoever reads the result adds the bias.
    """

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
        self.sequence_parallel = sequence_parallel
        self.alone = mesh.alone
        self.adds_bias = True
        self.weight = make_parameter(record, (record.shape[0], columns), mesh, dtype)
        # The bias is added once, after the sum; its gradient is partial where the sequence is cut.
        summed = ("tp",) if self.sequence_parallel else ()
        whole = sharding.whole(
            record.shape[:1], Init(), replicated=("tp",), summed=summed, decay=False
        )
        self.bias = make_parameter(whole, record.shape[:1], mesh, dtype) if bias else None

    @classmethod
    def even(
        cls,
        inputs: int,
        outputs: int,
        mesh: Mesh,
        dtype: torch.dtype,
        init: Init,
        *,
        bias: bool = True,
        sequence_parallel: bool = False,
    ) -> "RowParallelLinear":
        """Return a layer whose input features are cut evenly."""
        record = sharding.split((outputs, inputs), init, 1, mesh.tp.coordinate, mesh.tp.size)
        columns = divide(inputs, mesh.tp.size)
        return cls(record, columns, mesh, dtype, bias=bias, sequence_parallel=sequence_parallel)

    def forward(self, x_SBi: Tensor) -> Tensor:
        bias_O = self.bias if self.adds_bias else None
        if self.axis.size == 1:  # nothing is summed: the product adds the bias, a pass less
            return linear(x_SBi, self.weight, bias_O, self.axis, False)
        if self.sequence_parallel and self.axis.overlap:
            y_SBO: Tensor = _RowScatter.apply(x_SBi, self.weight, self.axis)
            return y_SBO if bias_O is None else y_SBO + bias_O
        partial = linear(x_SBi, self.weight, None, self.alone, False)
        y_SBO = mappings.leave(partial, self.axis, self.sequence_parallel)
        return y_SBO if bias_O is None else y_SBO + bias_O


class WholeLinear(nn.Module):
    """``y_SBO = x_SBI @ W_OI.T + b_O``: every rank holds all of it, and applies it to what it has.

    With ``sequence_parallel`` that is its own positions: gradients are partial there.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        init: Init,
        mesh: Mesh,
        dtype: torch.dtype,
        sequence_parallel: bool = False,
        *,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.alone = mesh.alone
        record = sharding.whole(
            shape,
            init,
            replicated=("tp",),
            summed=("tp",) if sequence_parallel else (),
            matrix=True,
        )
        self.weight = make_parameter(record, shape, mesh, dtype)
        self.bias = make_parameter(bias_record(record), shape[:1], mesh, dtype) if bias else None

    def forward(self, x_SBI: Tensor) -> Tensor:
        return linear(x_SBI, self.weight, self.bias, self.alone, False)
