"""What is trained, made from a run's config: chunks of the model, their optimizer, their passes.

A run, a comparison of layouts and a benchmark make the same parts here.
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import nn

from megatron.core import rng
from megatron.core.mesh import Mesh
from megatron.core.models.mtp import look_ahead
from megatron.core.optimizer.optimizer import Optimizer, build_optimizer
from megatron.core.pipeline_parallel.actions import Step
from megatron.core.pipeline_parallel.stages import Stage
from megatron.core.tensor_parallel.layers import without_memory
from megatron.core.tokenizers.vocabulary import Vocabulary
from megatron.core.transformer.plan import judged_routers_of, routers_of
from megatron.training.batches import Batch
from megatron.training.config import RunConfig
from megatron.training.objective import Objective
from megatron.training.passes import Activation, ForwardStep, Passes
from megatron.training.timers import Timers

BuildModel = Callable[[RunConfig, Mesh, Vocabulary, Sequence[Stage]], Sequence[nn.Module]]
"""Returns this rank's chunks of a model, one for each of its stages, with named records."""


def build_chunks(
    config: RunConfig,
    mesh: Mesh,
    vocabulary: Vocabulary,
    build_model: BuildModel,
    *,
    draws: bool = True,
) -> Sequence[nn.Module]:
    """Return this rank's chunks of a run's model.

    Args:
        config: the run.
        mesh: axes and device.
        vocabulary: its sizes on this layout.
        build_model: the program's.
        draws: draw the initial values; without, weights hold anything. With
            ``init_model_with_meta_device`` they have no memory until `build_run_optimizer` draws
            them.
    """
    stages, placement = config.stages, config.placement
    mine = [stages[at] for at in placement.positions(mesh.pp.coordinate)]
    if _fills_late(config):
        with without_memory():
            return build_model(config, mesh, vocabulary, mine)
    chunks = build_model(config, mesh, vocabulary, mine)
    if draws:
        for chunk in chunks:
            rng.initialize(chunk, config.training.seed)
    return chunks


def build_run_optimizer(config: RunConfig, chunks: Sequence[nn.Module], mesh: Mesh) -> Optimizer:
    """Return the optimizer of a run's chunks, whose parameters move into flat buffers."""
    fill = functools.partial(rng.fill, seed=config.training.seed)
    return build_optimizer(
        config.optimizer,
        chunks,
        mesh,
        config.precision,
        config.replicas,
        fill=fill if _fills_late(config) else None,
    )


def _fills_late(config: RunConfig) -> bool:
    return config.replicas.init_model_with_meta_device and not config.training.skip_train


def build_passes(
    config: RunConfig,
    mesh: Mesh,
    chunks: Sequence[nn.Module],
    forward_step: ForwardStep,
    timers: Timers,
    observe: Callable[[Step], None] | None = None,
) -> Passes:
    """Return the passes of a run; ``observe`` is told of each step."""
    return Passes(
        chunks,
        forward_step,
        build_objective(config, mesh),
        timers,
        pipeline=config.pipeline,
        placement=config.placement,
        activation=Activation(
            width=config.model.hidden_size,
            dtype=getattr(torch, config.residual_dtype),
            shares=config.sequence_shares,
            samples=config.training.micro_batch_size,
            sequence=config.positions,
        ),
        observe=observe,
    )


def build_objective(config: RunConfig, mesh: Mesh) -> Objective:
    """Return the objective of a run, with all the losses that its model has."""
    model, routers = config.model, routers_of(config.model)
    ranks = mesh.ep.size if mesh.ep.size > 1 else 0  # one has no share of the tokens to compare
    prepare: Callable[[Batch], Batch] = dict
    if model.mtp.depths:
        prepare = functools.partial(look_ahead, depths=model.mtp.depths)
    return Objective(
        config.training.calculate_per_token_loss,
        mesh,
        {**model.mtp.loss_weights, **model.bert.loss_weights},
        prepare,
        model.router.loss_weights if routers else {},
        routers,
        model.moe.num_experts or 0,
        ranks if config.logging.log_moe_overload_factor and routers else 0,
        judged_routers_of(model),
    )
