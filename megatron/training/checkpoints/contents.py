"""What a checkpoint of a run holds; `checkpoint_save` writes it and `checkpoint_load` reads it.

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
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatron.core import sharding
from megatron.core.dist_checkpointing import plan
from megatron.core.dist_checkpointing.plan import Item
from megatron.core.mesh import Mesh
from megatron.core.sharding import Sharding

WEIGHTS, OPTIMIZER, RANDOM = "model.", "optimizer.", "random."
MASTERS = f"{OPTIMIZER}master."


class OptimizerTensor(Protocol):
    """A parameter's share of one kind of optimizer state (`optimizer.StateTensor`)."""

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


class Optimizer(Protocol):
    """What checkpoints need of an optimizer."""

    def tensors(self) -> Iterable[OptimizerTensor]: ...

    def scalars(self) -> Mapping[str, Any]: ...

    def load_scalars(self, stored: Mapping[str, Any]) -> None: ...


def items(
    models: Sequence[nn.Module],
    optimizer: Optimizer | None,
    mesh: Mesh,
    *,
    saving: bool,
    states: bool = True,
) -> list[Item]:
    """Return weights and optimizer state of this rank.

    Args:
        models: the model chunks; named parameters with records.
        optimizer: None to leave its state out; masters come along in any case.
        mesh: this rank's place.
        saving: take what this rank owns, and its share of what the replicas have alike; else
            everything it holds.
        states: take the states of the update rule.
    """
    coordinates = {axis.name: axis.coordinate for axis in mesh.axes.values()} if saving else None
    everything = list(_weights(models, coordinates))
    for tensor in optimizer.tensors() if optimizer is not None else ():
        is_master = tensor.key.startswith(MASTERS)
        if is_master or states:
            weight = WEIGHTS + tensor.sharding.name
            everything.append(
                plan.of_flat(
                    tensor.key,
                    tensor.sharding,
                    tensor.shape,
                    tensor.start,
                    tensor.tensor,
                    coordinates=coordinates,
                    sources=(tensor.key, weight) if is_master else (),
                )
            )
    if saving:
        return plan.spread(everything, mesh.dp_cp.coordinate, mesh.dp_cp.size)
    return everything


def _weights(models: Sequence[nn.Module], coordinates: Mapping[str, int] | None) -> Iterator[Item]:
    seen: set[int] = set()
    for model in models:
        for parameter in model.parameters():
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            record = sharding.of(parameter)
            key = WEIGHTS + record.name
            fine = parameter.dtype in (torch.float32, torch.float64)
            sources = (MASTERS + record.name, key) if fine else (key,)
            yield plan.of_tensor(key, record, parameter, coordinates=coordinates, sources=sources)


def random_key(mesh: Mesh) -> str:
    """Return the key of this rank's random states."""
    return f"{RANDOM}{mesh.rank:05d}"
