"""The optimizer: one scale, norm, clip, update and cast, over flat shards.

    optimizer.zero_grad()
    ...                                        forward and backward of every microbatch
    optimizer.data_parallel.reduce_gradients()
    result = optimizer.step(1 / num_tokens, lr=..., weight_decay=...)

Nothing about the rate is kept here: the schedule gives it for every step. The gradient's scale (one
over the number of tokens and the loss scale) and the clip factor become one number that the fused
update applies, so that no extra pass over the gradients is made. A gradient that is not finite
leaves weights, states and the step count as they were; the caller reads the `Update` when it wants
to know, and only then waits for the device. `scaler` is the caller's too: the optimizer keeps it
and its state, and never looks at it.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core import comm, sharding
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.distributed.pieces import Fill, Pieces
from megatron.core.distributed.ranges import first_part
from megatron.core.distributed.replicas import Replicas
from megatron.core.mesh import Axis, Mesh
from megatron.core.optimizer import clip, groups, rules
from megatron.core.optimizer.adam import Adam
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.groups import Entry, Group, Rates
from megatron.core.optimizer.lion import Lion
from megatron.core.optimizer.mixed_precision import Dtypes, Shard, update
from megatron.core.optimizer.muon import Muon
from megatron.core.optimizer.norms import Norms
from megatron.core.optimizer.offload import HostShard
from megatron.core.optimizer.sgd import SGD
from megatron.core.optimizer.state import StateTensor, state_of
from megatron.core.optimizer.update import Signals, Step, UpdateRule
from megatron.core.precision.config import PrecisionConfig
from megatron.core.precision.loss_scaler import LossScaler

RULES: Mapping[str, Callable[[OptimizerConfig, Mesh], UpdateRule]] = {
    "adam": lambda config, mesh: Adam(config),
    "sgd": lambda config, mesh: SGD(config),
    "lion": lambda config, mesh: Lion(config),
    "muon": Muon,
}


@dataclass(frozen=True)
class Update:
    """What one step did; every tensor is a scalar on the device."""

    grad_norm: Tensor
    """Norm of the whole model's scaled gradient, before clipping."""
    clipped_norm: Tensor
    """The same after clipping: of what the update rules are given."""
    found_nonfinite: Tensor
    """1 when the norm was not finite and nothing was updated, else 0."""
    num_zeros: Tensor | None
    """Elements of the whole model's gradient that are zero, when asked for."""

    @property
    def updated(self) -> bool:
        """Return whether the weights were updated; waits for the device."""
        with comm.waiting("the norm of the gradient"):
            return not self.found_nonfinite.item()


class Optimizer:
    """Updates the parameters of this rank's model chunks, which lie in flat buffers."""

    def __init__(
        self,
        config: OptimizerConfig,
        data_parallel: Replicas,
        mesh: Mesh,
        dtypes: Dtypes,
        scaler: LossScaler,
    ) -> None:
        self.config, self.data_parallel, self.mesh = config, data_parallel, mesh
        self.dtypes, self.scaler = dtypes, scaler
        self._rules: dict[str, UpdateRule] = {n: RULES[n](config, mesh) for n in config.rules}
        self.shards = [shard for buffer in data_parallel.buffers for shard in self._shards(buffer)]
        self._learn_parts()
        group_of = groups.grouping(config)
        self._groups: dict[str, Group] = {}
        for parameter in (p for buffer in data_parallel.buffers for p in buffer.parameters):
            group = group_of(sharding.of(parameter))
            self._groups[group.name] = group
        self._step = torch.zeros((), dtype=torch.float32, device=mesh.device)
        self.norms = Norms(self.shards, list(self._groups), mesh)

    def _shards(self, buffer: Pieces) -> Iterator[Shard]:
        """Yield what this rank updates of a buffer: on the host, and on the device."""
        config, names = self.config, rules.states(buffer.plan.rule, self.config)
        host, device = first_part(buffer.spans, config.offloaded_fraction)
        if host:
            pins = (config.pin_cpu_grads, config.pin_cpu_params)
            overlaps = config.overlap_cpu_optimizer_d2h_h2d
            yield HostShard(buffer, host, names, self.dtypes, overlaps=overlaps, pins=pins)
        if device:
            yield Shard(buffer, device, names, self.dtypes)

    def _learn_parts(self) -> None:
        """Let Muon learn what peers hold of its matrices; a collective over ``tp``."""
        for name, rule in self._rules.items():
            if isinstance(rule, Muon):
                mine = [shard for shard in self.shards if shard.buffer.plan.rule == name]
                rule.prepare(member for shard in mine for _, member in shard.members())

    def describe(self) -> list[str]:
        """Return one line per group of the whole model's parameters; a collective over ``pp``.

        Raises:
            UserError: a pattern of --param-group-overrides fits no parameter.
        """
        group_of = groups.grouping(self.config)
        records = [sharding.of(p) for b in self.data_parallel.buffers for p in b.parameters]
        mine = [Entry(r.name, group_of(r), math.prod(r.shape)) for r in records]
        everyone = [entry for held in comm.gather_objects(mine, self.mesh.pp) for entry in held]
        groups.check_overrides(self.config, [entry.name for entry in everyone])
        return groups.describe(everyone)

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
        decoupled_lr: float | None = None,
        count_zeros: bool = False,
    ) -> Update:
        """Update every weight from ``gradient_scale`` times its summed gradient.

        Afterwards the gradients are used up (scaled, or not, as the update rule likes), unless they
        were not finite.

        Args:
            gradient_scale: positive, such as one over the number of tokens and the loss scale.
            lr: learning rate of this step.
            weight_decay: decay of the groups that are decayed.
            decoupled_lr: rate of embedding and output head; None: that of all others.
            count_zeros: count the gradient's zeros too.
        """
        norm, num_zeros = self.norms.gradient(gradient_scale, count_zeros)
        factor = clip.clip_factor(norm, self.config.clip_grad)
        finite = norm.isfinite()
        found = (~finite).float()
        # A refused gradient stays as it is, so that one can look which element is to blame.
        scale = torch.where(finite, factor * gradient_scale, 1.0)
        self._step += 1 - found
        rates = Rates(lr, weight_decay, decoupled_lr)
        told = Signals(self._step, self._apply_scale(scale), found)
        for shard in self.shards:
            shard.fetch()
        for shard in self.shards:
            rule, signals = self._rules[shard.buffer.plan.rule], shard.signals(told)
            for group, ranges in shard.groups:
                settings = self._groups[group].settings(rates)
                how = Step(**vars(signals), settings=settings)
                update(rule, ranges, how, self.dtypes.computing)
            shard.publish()
        self.data_parallel.publish_weights()
        return Update(norm, norm * factor, found, num_zeros)

    def _apply_scale(self, scale: Tensor) -> Tensor | None:
        """Return the fp32 divisor that applies ``scale`` in the update; None: it is applied."""
        if self.dtypes.computing == torch.float64:
            for shard in self.shards:
                torch._foreach_mul_(shard.grads, scale)  # the fused update would round it to fp32
            return None
        return scale.reciprocal().float()

    def tensors(self) -> Iterator[StateTensor]:
        """Yield the optimizer state of this rank, parameter by parameter, as it is kept.

        Weights that are updated in place are no state of the optimizer and do not appear.
        """
        for shard in self.shards:
            kinds = shard.kinds()
            for number, member in shard.members():
                for kind, pieces in kinds.items():
                    yield state_of(f"optimizer.{kind}", member, pieces[number][member.place])

    def copies(self, *, experts: bool) -> Axis:
        """Return the ranks that hold the same states: of experts, or of all else."""
        replicas = self.data_parallel
        return (replicas.expert_shares if experts else replicas.shares).copies

    def weights(self) -> Iterator[StateTensor] | None:
        """Return this rank's share of the weights as views, if it holds no more; else None.

        Either way all weights that this rank keeps are there.
        """
        replicas = self.data_parallel
        replicas.settle()
        if not replicas.shares.weights:
            return None
        return (state_of("model", member, tensor) for member, tensor in replicas.weights())

    def scalars(self) -> dict[str, Any]:
        """Return the state that is no tensor, as a checkpoint stores it."""
        state = self.scaler.state()
        return {"step": int(self._step.item())} | ({"loss_scale": state} if state else {})

    def load_scalars(self, stored: Mapping[str, Any]) -> None:
        """Set, never add to, the state that `scalars` gave."""
        self._step.fill_(stored["step"])
        self.scaler.load_state(stored.get("loss_scale", {}))

    def reload(self) -> None:
        """Take note that weights were loaded: masters that no checkpoint has are theirs."""
        for shard in self.shards:
            shard.reload()

    def memory(self) -> dict[str, int]:
        """Return the bytes this rank holds, by category."""
        held = [buffer.held() for buffer in self.data_parallel.buffers]
        here = [shard for shard in self.shards if not isinstance(shard, HostShard)]
        return {
            **{kind: sum(each[kind] for each in held) for kind in ("weights", "gradients")},
            "masters": sum(t.nbytes for s in here if s.has_masters for t in s.mains),
            "states": sum(shard.state_bytes for shard in here),
            "host": sum(s.host_bytes for s in self.shards if isinstance(s, HostShard)),
        }


def build_optimizer(
    config: OptimizerConfig,
    modules: Iterable[nn.Module],
    mesh: Mesh,
    precision: PrecisionConfig,
    replicas: DataParallelConfig | None = None,
    *,
    fill: Fill | None = None,
) -> Optimizer:
    """Return the optimizer of this rank's model chunks, whose parameters move into flat buffers.

    Args:
        config: the update rule.
        modules: with named parameters. Their values are there, since masters are taken from them,
            or ``fill`` gives values to those without memory.
        mesh: axes and device.
        precision: dtypes.
        replicas: how gradients are summed and what is shared out.
        fill: gives a parameter its values.
    """
    main, params = getattr(torch, precision.main_dtype), getattr(torch, precision.params_dtype)
    reduced, group_of = getattr(torch, precision.reduce_dtype), groups.grouping(config)
    data_parallel: Replicas
    if replicas is not None and replicas.use_torch_fsdp2 and replicas.shares(mesh.dp_cp.size) > 1:
        # Its parts of torch take longer to import than all else here.
        from megatron.core.distributed import torch_fsdp

        data_parallel = torch_fsdp.TorchFsdp(
            modules,
            mesh,
            torch_fsdp.Dtypes(main, params, reduced),
            group_of=group_of,
            config=replicas,
            fill=fill,
        )
    else:
        data_parallel = DataParallel(
            modules,
            mesh,
            getattr(torch, precision.grad_dtype),
            group_of=group_of,
            config=replicas,
            reduce_dtype=reduced,
            fill=fill,
        )
    dtypes = Dtypes(
        main=main,
        computing=getattr(torch, precision.accumulation_dtype),
        states={name: getattr(torch, kept) for name, kept in precision.state_dtypes.items()},
    )
    return Optimizer(config, data_parallel, mesh, dtypes, LossScaler(precision))
