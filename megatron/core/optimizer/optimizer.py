"""The optimizer: one scale, norm, clip, update and cast, over flat shards.

    optimizer.zero_grad()
    ...                                        forward and backward of every microbatch
    optimizer.data_parallel.reduce_gradients()
    result = optimizer.step(1 / num_tokens, lr=..., weight_decay=...)

Nothing about the rate is kept here: the schedule gives it for every step. The gradient's scale (one
over the number of tokens) and the clip factor become one number that the fused update applies, so
that no extra pass over the gradients is made. A gradient that is not finite leaves weights, states
and the step count as they were; the caller reads the `Update` when it wants to know, and only then
waits for the device.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from megatron.core import comm, sharding
from megatron.core.distributed import layout
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.mesh import Mesh
from megatron.core.optimizer import clip, groups
from megatron.core.optimizer.adam import Adam
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.groups import Settings
from megatron.core.optimizer.mixed_precision import Shard
from megatron.core.optimizer.sgd import SGD
from megatron.core.precision.config import PrecisionConfig
from megatron.core.sharding import Sharding


class UpdateRule(Protocol):
    """How a flat range is updated from its gradient."""

    state_names: tuple[str, ...]

    def update(
        self,
        parameter: Tensor,
        grad: Tensor,
        state: dict[str, Tensor],
        settings: Settings,
        *,
        step: Tensor,
        inverse_scale: Tensor | None,
        found_nonfinite: Tensor,
    ) -> None: ...


RULES: dict[str, type[Adam] | type[SGD]] = {"adam": Adam, "sgd": SGD}


@dataclass(frozen=True)
class Update:
    """What one step did; every tensor is a scalar on the device."""

    grad_norm: Tensor
    """Norm of the whole model's scaled gradient, before clipping."""
    found_nonfinite: Tensor
    """1 when the norm was not finite and nothing was updated, else 0."""
    num_zeros: Tensor | None
    """Elements of the whole model's gradient that are zero, when asked for."""

    @property
    def updated(self) -> bool:
        """Return whether the weights were updated; waits for the device."""
        with comm.waiting("the norm of the gradient"):
            return not self.found_nonfinite.item()


@dataclass(frozen=True)
class StateTensor:
    """One parameter's share of one kind of optimizer state, for checkpoints."""

    key: str
    """``optimizer.KIND.PARAMETER``; KIND is ``master`` or a state of the update rule."""
    sharding: Sharding
    """Record of the parameter."""
    shape: tuple[int, ...]
    """Local shape of the parameter."""
    start: int
    stop: int
    """Range of the flattened local parameter that `tensor` holds."""
    tensor: Tensor
    """One-dimensional view: to load is to copy into it."""


class Optimizer:
    """Updates the parameters of this rank's model chunks, which lie in flat buffers."""

    def __init__(self, config: OptimizerConfig, data_parallel: DataParallel, mesh: Mesh) -> None:
        self.config, self.data_parallel, self.mesh = config, data_parallel, mesh
        self._rule: UpdateRule = RULES[config.optimizer](config)
        buffers = data_parallel.buffers
        self.shards = [
            Shard(buffer, span, self._rule.state_names, buffer.grad.dtype)
            for buffer in buffers
            for span in buffer.plan.shards(0, 1)
        ]
        self._step = torch.zeros((), dtype=torch.float32, device=mesh.device)
        # Replicas hold the same gradients: one of them counts.
        self._owned: list[list[slice]] = []
        self._owned_numel = 0
        for buffer in buffers:
            counts = mesh[buffer.data_axis].coordinate == 0
            self._owned_numel += buffer.owned_numel(mesh) if counts else 0
        for shard in self.shards:
            counts = mesh[shard.buffer.data_axis].coordinate == 0
            self._owned.append(shard.cut(shard.buffer.owned_ranges(mesh)) if counts else [])

    def zero_grad(self) -> None:
        """Set all gradients to zero."""
        self.data_parallel.zero_grad()

    @torch.no_grad()
    def step(
        self,
        gradient_scale: float | Tensor,
        *,
        lr: float,
        weight_decay: float,
        count_zeros: bool = False,
    ) -> Update:
        """Update every weight from ``gradient_scale`` times its summed gradient.

        Afterwards the gradients are used up (scaled, or not, as the update rule likes), unless they
        were not finite.

        Args:
            gradient_scale: positive, such as one over the number of tokens.
            lr: learning rate of this step.
            weight_decay: decay of the groups that are decayed.
            count_zeros: count the gradient's zeros too.
        """
        norm, num_zeros = self._measure(gradient_scale, count_zeros)
        factor = clip.clip_factor(norm, self.config.clip_grad)
        finite = norm.isfinite()
        found = (~finite).float()
        # A refused gradient stays as it is, so that one can look which element is to blame.
        scale = torch.where(finite, factor * gradient_scale, 1.0)
        self._step += 1 - found
        options = groups.settings(lr, weight_decay)
        for shard in self.shards:
            inverse = self._apply_scale(shard, scale)
            for group, part in shard.segments():
                self._rule.update(
                    shard.main[part],
                    shard.grad[part],
                    {name: state[part] for name, state in shard.state.items()},
                    options[group],
                    step=self._step,
                    inverse_scale=inverse,
                    found_nonfinite=found,
                )
            shard.publish()
        return Update(norm, found, num_zeros)

    def _apply_scale(self, shard: Shard, scale: Tensor) -> Tensor | None:
        """Return the fp32 divisor that applies ``scale`` in the update; None: it is applied."""
        if shard.grad.dtype == torch.float64:
            shard.grad *= scale  # the fused update would round the scale to fp32
            return None
        return scale.reciprocal().float()

    def _measure(
        self, gradient_scale: float | Tensor, count_zeros: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the norm of the whole model's scaled gradient, and the count of its zeros."""
        device = self.mesh.device
        totals = torch.zeros(2, dtype=torch.float64, device=device)
        totals[0] = clip.sum_of_squares(self._owned_of("grad"), device)
        if count_zeros:
            totals[1] = clip.count_zeros(self._owned_of("grad"), self._owned_numel, device)
        comm.all_reduce(totals, self.mesh.world)
        return totals[0].sqrt() * gradient_scale, totals[1] if count_zeros else None

    def _owned_of(self, what: str) -> Iterator[Tensor]:
        for shard, parts in zip(self.shards, self._owned, strict=True):
            flat: Tensor = getattr(shard, what)
            for part in parts:
                yield flat[part]

    @torch.no_grad()
    def params_norm(self) -> Tensor:
        """Return the norm of the whole model's weights (of the masters, where there are)."""
        total = clip.sum_of_squares(self._owned_of("main"), self.mesh.device)
        comm.all_reduce(total, self.mesh.world)
        return total.sqrt()

    def tensors(self) -> Iterator[StateTensor]:
        """Yield the optimizer state of this rank, parameter by parameter, as views.

        Weights that are updated in place are no state of the optimizer and do not appear.
        """
        for shard in self.shards:
            kinds = {"master": shard.main} if shard.has_masters else {}
            kinds.update(shard.state)
            buffer = shard.buffer
            for slot, parameter in zip(buffer.plan.slots, buffer.parameters, strict=True):
                common = layout.intersect((slot.start, slot.stop), shard.span)
                if common is None:
                    continue
                start, stop = common[0] - shard.span[0], common[1] - shard.span[0]
                record = sharding.of(parameter)
                for kind, flat in kinds.items():
                    yield StateTensor(
                        key=f"optimizer.{kind}.{record.name}",
                        sharding=record,
                        shape=tuple(parameter.shape),
                        start=common[0] - slot.start,
                        stop=common[1] - slot.start,
                        tensor=flat[start:stop],
                    )

    def scalars(self) -> dict[str, int]:
        """Return the state that is no tensor, as a checkpoint stores it."""
        return {"step": int(self._step.item())}

    def load_scalars(self, stored: Mapping[str, int]) -> None:
        """Set, never add to, the state that `scalars` gave."""
        self._step.fill_(stored["step"])

    def memory(self) -> dict[str, int]:
        """Return the bytes this rank holds, by category."""
        buffers = self.data_parallel.buffers
        return {
            "weights": sum(buffer.data.nbytes for buffer in buffers),
            "gradients": sum(buffer.grad.nbytes for buffer in buffers),
            "masters": sum(shard.main.nbytes for shard in self.shards if shard.has_masters),
            "states": sum(t.nbytes for shard in self.shards for t in shard.state.values()),
        }


def build_optimizer(
    config: OptimizerConfig,
    modules: Iterable[nn.Module],
    mesh: Mesh,
    precision: PrecisionConfig,
    replicas: DataParallelConfig | None = None,
) -> Optimizer:
    """Return the optimizer of this rank's model chunks, whose parameters move into flat buffers.

    The parameters are named and initialised already: masters are taken from them. ``replicas`` says
    how their gradients are summed.
    """
    grad_dtype: torch.dtype = getattr(torch, precision.accumulation_dtype)
    data_parallel = DataParallel(
        modules, mesh, grad_dtype, group_of=groups.grouping(config), config=replicas
    )
    return Optimizer(config, data_parallel, mesh)
