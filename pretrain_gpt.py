"""Pretrain a GPT.

Here is what is GPT's own: its model, its data and a forward step. Copy this file to train something
else; everything around it (flags, processes, the loop, checkpoints, logs) is `megatron.training`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.training import arguments
from megatron.training.own_loaders import refuse_external
from megatron.training.plan import report as plan_report
from megatron.training.processes import launch

if TYPE_CHECKING:  # torch is imported when training begins: --help and --dry-run do without
    from torch import Tensor

    from megatron.core.datasets.builder import Built, Sizes
    from megatron.core.datasets.cache import BuildPolicy
    from megatron.core.mesh import Mesh
    from megatron.core.models.gpt import GPTModel
    from megatron.core.pipeline_parallel.stages import Stage
    from megatron.core.rng import DropoutKey
    from megatron.core.tokenizers.base import Tokenizer
    from megatron.core.tokenizers.vocabulary import Vocabulary
    from megatron.core.utils import Say
    from megatron.training.batches import Batch
    from megatron.training.config import RunConfig
    from megatron.training.objective import TokenLosses

PROGRAM = "pretrain_gpt"


def build_model(
    config: RunConfig, mesh: Mesh, vocabulary: Vocabulary, stages: Sequence[Stage]
) -> list[GPTModel]:
    """Return this rank's stages of the model; their values are drawn afterwards."""
    import torch

    from megatron.core.models.gpt import build_stages

    return build_stages(
        config.model,
        mesh,
        stages,
        vocab_size=vocabulary.rows,
        padded_vocab_size=vocabulary.padded_rows,
        dtype=getattr(torch, config.precision.params_dtype),
        sequence_parallel=config.parallel.sequence_parallel,
        context_kinds=config.context.kinds(config.model.num_layers),
    )


def build_datasets(
    config: RunConfig, sizes: Sizes, tokenizer: Tokenizer, policy: BuildPolicy, say: Say
) -> Built:
    """Return the training, validation and test sets."""
    from megatron.training.data import data_sets

    return data_sets(PROGRAM, config, sizes, tokenizer, policy, say)


def forward_step(
    model: GPTModel, batch: Batch, x_SBH: Tensor | None, dropout: DropoutKey | None
) -> TokenLosses | Tensor:
    """Return a stage's hidden states or, of the last, the tokens' losses and which of them count.

    ``x_SBH`` is what the stage before returned; a stage between the ends may get an empty batch.
    """
    from megatron.core.kernels.attention import Packing
    from megatron.core.models.mtp import Ahead
    from megatron.training.objective import TokenLosses

    bounds, ahead = batch.get("cu_seqlens"), Ahead.of(batch)
    out = model(
        batch.get("tokens"),
        batch.get("labels"),
        x_SBH=x_SBH,
        position_ids_BS=batch.get("position_ids"),
        packing=None if bounds is None else Packing(bounds),
        dropout=dropout,
        ahead=ahead,
    )
    if not model.stage.is_last:
        return out
    if ahead is None:
        return TokenLosses(out, batch["loss_mask"])
    main, *further = out
    masked = zip(further, ahead.mask_BSK.unbind(-1), strict=True)
    auxiliary = dict(zip(model.config.mtp.loss_weights, masked, strict=True))
    return TokenLosses(main, batch["loss_mask"], auxiliary)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    place = launch.discover(os.environ)
    run = arguments.parse(argv, PROGRAM, world_size=place.world_size)
    refuse_external(run.config.data, PROGRAM)
    if run.invocation.dry_run:
        if place.rank == 0:
            print(plan_report.report(run, PROGRAM))
        return 0
    if run.invocation.local_rank is not None:
        place = launch.discover(os.environ, run.invocation.local_rank)
    from megatron.training.pretrain import pretrain
    from megatron.training.program import Program

    program = Program(
        build_model=build_model, build_datasets=build_datasets, forward_step=forward_step
    )
    return pretrain(run, place, program)


if __name__ == "__main__":
    arguments.run_main(main, PROGRAM)
