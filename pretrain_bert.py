"""Pretrain a BERT: an encoder alone, on masked words and the order of sentences.

Here is what is BERT's own: its model, its data and a forward step. Everything around it (flags,
processes, the loop, checkpoints, logs) is `megatron.training`.
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
    from megatron.core.models.bert import BertModel
    from megatron.core.pipeline_parallel.stages import Stage
    from megatron.core.rng import DropoutKey
    from megatron.core.tokenizers.base import Tokenizer
    from megatron.core.tokenizers.vocabulary import Vocabulary
    from megatron.core.utils import Say
    from megatron.training.batches import Batch
    from megatron.training.config import RunConfig
    from megatron.training.objective import TokenLosses

PROGRAM = "pretrain_bert"


def build_model(
    config: RunConfig, mesh: Mesh, vocabulary: Vocabulary, stages: Sequence[Stage]
) -> list[BertModel]:
    """Return this rank's stages of the model; their values are drawn afterwards."""
    import torch

    from megatron.core.models.bert import build_bert_stages

    return build_bert_stages(
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
    """Return the training, validation and test sets: what the data flags say, of masked words."""
    from megatron.training.data import data_sets

    return data_sets(PROGRAM, config, sizes, tokenizer, policy, say)


def forward_step(
    model: BertModel, batch: Batch, x_SBH: Tensor | None, dropout: DropoutKey | None
) -> TokenLosses | Tensor:
    """Return a stage's hidden states or, of the last, the losses of words and of samples' orders.

    ``x_SBH`` is what the stage before returned.
    """
    import torch

    from megatron.core.kernels.attention import Packing
    from megatron.core.transformer.bert_config import ORDER_LOSS
    from megatron.training.objective import TokenLosses

    order_B = batch.get("sentence_order")
    out = model(
        batch.get("tokens"),
        batch.get("labels"),
        order_B,
        x_SBH=x_SBH,
        token_types_BS=batch.get("token_types"),
        packing=Packing(batch["cu_seqlens"]),
        dropout=dropout,
    )
    if isinstance(out, torch.Tensor):
        return out
    auxiliary = {}
    if out.order is not None and order_B is not None:
        # Of a sample that is cut over ranks, the one with its first token knows its order.
        counts_B = (order_B >= 0) & (model.mesh.cp.coordinate == 0)
        auxiliary[ORDER_LOSS] = out.order[:, None], counts_B[:, None]
    return TokenLosses(out.words, batch["loss_mask"], auxiliary)


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
