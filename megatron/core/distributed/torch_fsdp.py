"""Everything shared out by torch's ``fully_shard`` (``--use-torch-fsdp2``; Zhao et al., 2023).

torch cuts every parameter by rows over the replicas and keeps a `DTensor` in its place. Its hooks
gather a unit's weights before its forward and its backward, in the dtype of activations, and sum
its gradients after its backward, microbatch by microbatch, into fp32 ones: no masters are needed,
since the weights that are kept are that fine. When what is gathered or summed is torch's matter;
here are the units, the memory of gradients, and what the optimizer and checkpoints see:

    parameter   | rows of rank 0 | rows of rank 1 | ... | padding |
    grad        | a view of one flat piece, to which torch adds     |

Units are those of `units`. Two that share a parameter (a tied embedding and its head) are gathered
and given up together, so their weights are there from the first one's forward to the last one's,
and for all of the backward. Collectives go through `comm`, as sums: nothing is averaged.

This takes one chunk of a model: torch reduces in autograd's hooks, which a backward in two parts,
as some pipeline schedules have it, does not call.
"""

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megatron.core import comm, sharding
from megatron.core.distributed import finalize, pieces, reduction, torch_rows
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.distributed.pieces import Fill, GroupOf, Member
from megatron.core.distributed.replicas import shares_of
from megatron.core.distributed.units import Unit, find_units
from megatron.core.mesh import Axis, Mesh
from megatron.core.sharding import Sharding


class Dtypes(NamedTuple):
    """Number formats of what torch shares out."""

    kept: torch.dtype
    """Of the weights and gradients that a rank keeps."""
    computing: torch.dtype
    """Of weights while their unit computes."""
    reduced: torch.dtype
    """Of gradients while they travel."""


class TorchFsdp:
    """The weights and gradients of a rank's only chunk, which torch shares out; see `Replicas`.

    Args:
        chunks: the one chunk; its parameters have records.
        mesh: axes and device.
        dtypes: number formats.
        group_of: gives the optimizer group of a parameter.
        config: what is shared out among whom.
        fill: gives values to parameters without memory.
    """

    def __init__(
        self,
        chunks: Iterable[nn.Module],
        mesh: Mesh,
        dtypes: Dtypes,
        *,
        group_of: GroupOf,
        config: DataParallelConfig,
        fill: Fill | None = None,
    ) -> None:
        (model,) = chunks
        self.mesh, self.shares = mesh, shares_of(config, mesh)
        self.expert_shares = self.shares  # rules refuse experts
        self.divisor = reduction.divisor(self.shares, dtypes.reduced)
        axis, order = self.shares.axis, [sharding.of(p).name for p in model.parameters()]
        assert axis.group is not None, "replicas that share out are at least two"
        assert tuple(dist.get_process_group_ranks(axis.group)) == axis.ranks, axis
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        for parameter in self._frozen:
            pieces.provide(parameter, fill)
        # Losses are views, and nobody writes into what a unit returns.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
        shard = functools.partial(
            fully_shard,
            mesh=DeviceMesh.from_group(axis.group, mesh.device.type),
            reshard_after_forward=config.torch_fsdp2_reshard_after_forward,
            # Modules know their dtypes: nothing is cast for them.
            mp_policy=MixedPrecisionPolicy(
                dtypes.computing, dtypes.reduced, cast_forward_inputs=False
            ),
            ignored_params=set(self._frozen),
        )
        # Inner units first: an outer one takes what is left.
        self._groups = [
            _Group(modules, shard, dtypes.kept, _Gather(axis), _Sum(axis, self.divisor), fill)
            for modules in _grouped(find_units([model])[::-1])
        ]
        if not isinstance(model, FSDPModule):  # no parameter of its own; its hooks begin a forward
            shard(model)
        self.buffers = torch_rows.build(self._in_order(order), self.shares, group_of)

    @property
    def _sharded(self) -> list[nn.Parameter]:
        return [parameter for group in self._groups for parameter in group.parameters()]

    def _in_order(self, names: Sequence[str]) -> list[nn.Parameter]:
        places = {name: place for place, name in enumerate(names)}
        return sorted(self._sharded, key=lambda p: places[sharding.of(p).name])

    def zero_grad(self) -> None:
        """Set all gradients to zero."""
        for buffer in self.buffers:
            buffer.zero_grad()

    def begin(self, chunk: int, kind: str, last: bool) -> None:
        """Take note of a backward: torch's hooks do the rest."""
        assert kind == "backward", f"torch's fully_shard knows no {kind}"

    def finish(self, chunk: int, kind: str, last: bool) -> None:
        """Do nothing: the sums of a backward are done at its end."""

    def reduce_gradients(self) -> None:
        """Add up what groups of replicas have, and sum over the axes that regions name."""
        for buffer in self.buffers:
            buffer.check_gradients()
            comm.all_reduce(buffer.grad, self.shares.copies)
        finalize.sum_regions(self.buffers, self.mesh)

    def publish_weights(self) -> None:
        """Do nothing: weights are gathered when a unit needs them."""

    def settle(self) -> None:
        """Give up whole weights that an evaluation has left, where a forward keeps them."""
        for group in self._groups:
            group.unit.reshard()

    def whole_parameters(self) -> Iterator[nn.Parameter]:
        """Yield `parameters`, each with all of its weights there until the next is asked for.

        They are as a unit computes with them, in the dtype of activations. A collective of those
        who share weights.
        """
        for group in self._groups:
            group.unit.unshard()
            yield from group.parameters()
            group.unit.reshard()
        yield from self._frozen

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return all parameters of the chunk, each once: by units, inner ones first."""
        return [*self._sharded, *self._frozen]

    def gradients(self) -> Iterator[tuple[Member, Tensor]]:
        """Yield what this rank has of each parameter's reduced gradient, as flat views."""
        return pieces.gradients(self.buffers)

    def weights(self) -> Iterator[tuple[Member, Tensor]]:
        """Yield what this rank updates of each parameter, as flat views."""
        return pieces.weights(self.buffers)


class _Place(NamedTuple):
    """Where a module holds a parameter: torch puts others there, without the record."""

    owner: nn.Module
    name: str
    record: Sharding


class _Group:
    """Units whose weights come and go together."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        shard: Callable[..., Any],
        kept: torch.dtype,
        gather: "_Gather",
        add: "_Sum",
        fill: Fill | None,
    ) -> None:
        self._places = list(_places(modules))
        for owner, name, _ in self._places:
            parameter = getattr(owner, name)
            pieces.provide(parameter, fill)
            parameter.data = parameter.data.to(kept)
        shard(list(modules) if len(modules) > 1 else modules[0])
        unit = modules[0]
        assert isinstance(unit, FSDPModule)
        self.unit = unit
        """Stands for all of them."""
        unit.set_custom_all_gather(gather)  # type: ignore[arg-type]  # as good as one
        unit.set_custom_reduce_scatter(add)  # type: ignore[arg-type]
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that are in place now: this rank's rows, or all of them."""
        for owner, name, record in self._places:
            yield sharding.attach(getattr(owner, name), record)


class _Communication:
    """What torch asks of collectives over an axis."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for one call."""
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Communication):
    """Gathers weights."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        assert not async_op
        comm.all_gather_into(output_tensor, input_tensor, self._axis)


class _Sum(_Communication):
    """Sums gradients, divided by a number before."""

    def __init__(self, axis: Axis, divisor: int) -> None:
        super().__init__(axis)
        self._divisor = divisor

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        assert op == dist.ReduceOp.SUM and not async_op, op
        if self._divisor > 1:
            input_tensor.div_(self._divisor)
        comm.reduce_scatter_into(output_tensor, input_tensor, self._axis)


def _grouped(units: Sequence[Unit]) -> list[list[nn.Module]]:
    """Return the modules of units, those together that share a parameter, in order."""
    groups: list[tuple[set[int], list[nn.Module]]] = []
    for unit in units:
        mine, modules = set(map(id, unit.parameters)), [unit.module]
        apart = []
        for others, theirs in groups:
            if mine & others:
                mine, modules = mine | others, [*theirs, *modules]
            else:
                apart.append((others, theirs))
        groups = [*apart, (mine, modules)]
    return [modules for _, modules in groups]


def _places(modules: Iterable[nn.Module]) -> Iterator[_Place]:
    """Yield where modules hold parameters that are not shared out yet, each parameter once."""
    seen: set[int] = set()
    for module in modules:
        for owner in module.modules():
            for name, parameter in owner.named_parameters(recurse=False):
                fresh = parameter.requires_grad and not isinstance(parameter, DTensor)
                if fresh and id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield _Place(owner, name, sharding.of(parameter))
