"""Norm, zeros and refusal are those of the gathered gradient, on every layout and strategy."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import pretrain_gpt
from megatron.core import sharding
from megatron.core.dist_checkpointing.plan import of_flat
from megatron.core.rng import key
from megatron.core.tokenizers.vocabulary import resolve_vocabulary
from megatron.training import arguments
from megatron.training.build import build_chunks, build_run_optimizer
from megatron.training.processes import setup
from tests.harness import Pool

# Tied ends, a vocabulary with rows of padding, and query groups that ranks share.
RUN = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--max-position-embeddings 16 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 60 --train-iters 1 --device cpu --global-batch-size 8 --fp64 "
    "--group-query-attention --num-query-groups 2 --clip-grad 0.5"
)
TP4 = "--tensor-model-parallel-size 4 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
LAYOUTS = {
    "serial": (1, ""),
    "tp4": (4, TP4),
    "pp2 dp2 optim": (4, f"{PP2} --use-distributed-optimizer --ddp-num-buckets 3"),
    "tp4 dp2 optim_grads": (8, f"{TP4} --data-parallel-sharding-strategy optim_grads"),
    "tp4 pp2 dp2": (16, f"{TP4} {PP2}"),
    "pp2 dp4 all": (8, f"{PP2} --use-megatron-fsdp --num-distributed-optimizer-instances 2"),
    "tp4 dp2 by torch": (8, f"{TP4} --use-torch-fsdp2"),
    "host": (2, "--use-distributed-optimizer --optimizer-cpu-offload"),
}


def gradient(name: str, shape: tuple[int, ...], kind: str) -> Tensor:
    """Return the made-up gradient of a logical tensor; a third of it is zero."""
    generator = torch.Generator().manual_seed(key("gradient", name) % 2**63)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    values[torch.rand(shape, generator=generator) < 1 / 3] = 0
    if kind == "zero":
        values.zero_()
    elif name.endswith("layers.1.mlp.linear_fc2.weight") and kind != "plain":
        values[-1, -1] = float(kind)
    return values


def measured(rank: int, world: int, words: str, kind: str) -> tuple[Any, ...]:
    """Return norm, zeros, whether weights changed, and the logical shapes this rank knows."""
    config = arguments.parse(f"{RUN} {words}".split(), world_size=world).config
    mesh = setup.connected_mesh(config, torch.device("cpu"))
    vocabulary = resolve_vocabulary(config.tokenizer, 61, mesh.tp.size)
    chunks = build_chunks(config, mesh, vocabulary, pretrain_gpt.build_model)
    optimizer = build_run_optimizer(config, chunks, mesh)
    replicas = optimizer.data_parallel
    optimizer.zero_grad()
    for member, flat in replicas.gradients():
        whole = gradient(member.record.name, member.record.shape, kind)
        # Pieces are views: this sets the gradient, and leaves rows of padding alone.
        for piece in of_flat("", member.record, member.shape, member.start, flat).pieces:
            piece.tensor.copy_(whole[sharding.box_slices(piece.box)])
    before = [tensor.clone() for _, tensor in replicas.weights()]
    result = optimizer.step(0.5, lr=0.1, weight_decay=0.1, count_zeros=True)
    moved = any(
        not torch.equal(old, new) for old, (_, new) in zip(before, replicas.weights(), strict=True)
    )
    shapes = {sharding.of(p).name: sharding.of(p).shape for p in replicas.parameters}
    assert result.num_zeros is not None
    return float(result.grad_norm), float(result.num_zeros), result.updated, moved, shapes


@pytest.mark.parametrize("kind", ["plain", "zero", "inf", "-inf", "nan"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_norm_is_that_of_the_gathered_gradient(pool: Pool, layout: str, kind: str) -> None:
    world, words = LAYOUTS[layout]
    ranks = pool.run(world, measured, world, words, kind)
    shapes = {name: shape for *_, found in ranks for name, shape in found.items()}
    gathered = [gradient(name, shape, kind) for name, shape in shapes.items()]
    norm = 0.5 * math.sqrt(sum(float(each.square().sum()) for each in gathered))
    zeros = sum(int((each == 0).sum()) for each in gathered)
    for found, counted, updated, moved, _ in ranks:
        if kind in ("plain", "zero"):
            assert found == pytest.approx(norm, rel=1e-12)
        else:
            assert not math.isfinite(found)
        assert counted == zeros
        assert updated == moved == (kind in ("plain", "zero"))
