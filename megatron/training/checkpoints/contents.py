"""What a checkpoint of a run holds; `save` writes it and `load` reads it.

A checkpoint has four parts: weights, optimizer state, random states, and facts (counters, schedule,
config, tokenizer ...), the last in JSON. Each is loaded or left out by a flag of its own.

    model.NAME              a weight, without rows that only pad the vocabulary
    optimizer.master.NAME   its finer copy, where weights are bf16 or fp16
    optimizer.KIND.NAME     a state of the update rule
    random.RANK             generators of a rank, as bytes

A master stands in for a weight of a run in fp32 or fp64, and a weight for a master that was not
stored, so that a run may go on in another precision.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatron.core import sharding
from megatron.core.dist_checkpointing import plan
from megatron.core.dist_checkpointing.plan import Coded, Item
from megatron.core.mesh import Axis, Mesh
from megatron.core.sharding import Sharding

WEIGHTS, OPTIMIZER, RANDOM = "model.", "optimizer.", "random."
MASTERS = f"{OPTIMIZER}master."


class OptimizerTensor(Protocol):
    """A parameter's share of one kind of optimizer state (`state.StateTensor`)."""

    @property
    def key(self) -> str: ...

    @property
    def sharding(self) -> Sharding: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def start(self) -> int: ...

    @property
    def tensor(self) -> Tensor: ...

    @property
    def coded(self) -> Coded | None:
        """What keeps the numbers, where the tensor has no memory."""
        ...


class Optimizer(Protocol):
    """What checkpoints need of an optimizer."""

    def copies(self, *, experts: bool) -> Axis:
        """Return the ranks that hold the same states: of experts, or of all else."""
        ...

    def weights(self) -> Iterable[OptimizerTensor] | None:
        """Return this rank's share of the weights, if it holds no more."""
        ...

    def tensors(self) -> Iterable[OptimizerTensor]: ...

    def scalars(self) -> Mapping[str, Any]: ...

    def load_scalars(self, stored: Mapping[str, Any]) -> None: ...

    def reload(self) -> None:
        """Take note that weights were loaded."""
        ...


def items(
    models: Sequence[nn.Module],
    optimizer: Optimizer | None,
    mesh: Mesh,
    *,
    saving: bool,
    states: bool = True,
    spread: bool = True,
    masters: bool = True,
) -> list[Item]:
    """Return weights and optimizer state of this rank.

    Args:
        models: the model chunks; named parameters with records.
        optimizer: None to leave its state out; masters come along in any case.
        mesh: this rank's place.
        saving: take what this rank owns, and its share of what the replicas have alike; else
            everything it holds.
        states: take the states of the update rule.
        spread: when saving, let replicas share what they hold alike; else the first takes it all.
        masters: fill from stored masters where there are any; else from weights alone.
    """
    coordinates = {axis.name: axis.coordinate for axis in mesh.axes.values()} if saving else None
    shared = optimizer.weights() if optimizer is not None else None
    kept = [
        (tensor.sharding.expert, _flat(tensor, coordinates, _weight_sources(tensor, masters)))
        for tensor in shared or ()
    ]
    weights = list(_whole_weights(models, coordinates, masters, frozen=shared is not None))
    for tensor in optimizer.tensors() if optimizer is not None else ():
        is_master = tensor.key.startswith(MASTERS)
        if is_master or states:
            stored = (tensor.key,) if masters else ()
            sources = (*stored, WEIGHTS + tensor.sharding.name) if is_master else ()
            kept.append((tensor.sharding.expert, _flat(tensor, coordinates, sources)))
    if not saving:
        return [item for _, item in (*weights, *kept)]
    # What ranks hold alike they write in turns; what each has a share of is nobody else's.
    found: list[Item] = []
    for experts, replicas in ((False, mesh.dp_cp), (True, mesh.edp)):
        copies = optimizer.copies(experts=experts) if optimizer is not None else replicas
        found += _share([item for mine, item in weights if mine == experts], replicas, spread)
        found += _share([item for mine, item in kept if mine == experts], copies, spread)
    return found


def _share(alike: Sequence[Item], replicas: Axis, spread: bool) -> Sequence[Item]:
    """Return what this rank writes of what all ``replicas`` hold."""
    if spread:
        return plan.spread(alike, replicas.coordinate, replicas.size)
    return alike if replicas.coordinate == 0 else [replace(item, pieces=()) for item in alike]


def _flat(
    tensor: OptimizerTensor, coordinates: Mapping[str, int] | None, sources: Sequence[str]
) -> Item:
    return plan.of_flat(
        tensor.key,
        tensor.sharding,
        tensor.shape,
        tensor.start,
        tensor.tensor,
        coordinates=coordinates,
        sources=sources,
        coded=tensor.coded,
    )


def _weight_sources(tensor: OptimizerTensor, masters: bool) -> tuple[str, ...]:
    return _sources(tensor.sharding.name, tensor.tensor.dtype, masters)


def _sources(name: str, dtype: torch.dtype, masters: bool) -> tuple[str, ...]:
    """Return what a weight may be filled from: a fine one rather from its master."""
    fine = masters and dtype in (torch.float32, torch.float64)
    return (MASTERS + name, WEIGHTS + name) if fine else (WEIGHTS + name,)


def _whole_weights(
    models: Sequence[nn.Module],
    coordinates: Mapping[str, int] | None,
    masters: bool,
    *,
    frozen: bool,
) -> Iterator[tuple[bool, Item]]:
    """Yield weights that this rank holds whole: all, or only those that are not trained.

    With each comes whether it is of experts, who have replicas of their own.
    """
    seen: set[int] = set()
    for model in models:
        for parameter in model.parameters():
            if id(parameter) in seen or (frozen and parameter.requires_grad):
                continue
            seen.add(id(parameter))
            record = sharding.of(parameter)
            key = WEIGHTS + record.name
            sources = _sources(record.name, parameter.dtype, masters)
            item = plan.of_tensor(key, record, parameter, coordinates=coordinates, sources=sources)
            yield record.expert, item


def random_key(mesh: Mesh) -> str:
    """Return the key of this rank's random states."""
    return f"{RANDOM}{mesh.rank:05d}"
