"""fp16 moments with scales, handed from layout to layout: blocks differ, numbers do not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron.core import rng
from megatron.core.dist_checkpointing.plan import values
from megatron.core.dist_checkpointing.reader import Checkpoint
from megatron.core.dist_checkpointing.staging import HostBuffer, stage
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.grid import ParallelConfig
from megatron.core.mesh import Mesh
from megatron.core.models.gpt import build_stages
from megatron.core.optimizer.config import OptimizerConfig, ScheduleConfig
from megatron.core.optimizer.optimizer import Optimizer, build_optimizer
from megatron.core.pipeline_parallel.stages import make_stages
from megatron.core.precision.config import PrecisionConfig
from megatron.core.transformer.config import TransformerConfig
from megatron.core.utils import silent
from megatron.training.checkpoint_config import CheckpointConfig
from megatron.training.checkpoints.contents import items
from megatron.training.checkpoints.facts import RunFacts
from megatron.training.checkpoints.load import load_checkpoint
from megatron.training.checkpoints.run import CheckpointedRun
from megatron.training.checkpoints.save import save_checkpoint
from megatron.training.state import TrainState
from tests.harness import Pool

FACTS = RunFacts(
    config={}, schedule=None, tokenizer="", vocabulary=6, vocabulary_rows=6, objective="tokens"
)
# Ranks, tensor-parallel ranks, what replicas share out, formats of both moments.
CHAIN: list[tuple[int, int, dict[str, Any], tuple[str, str]]] = [
    (2, 1, {"data_parallel_sharding_strategy": "optim"}, ("fp16", "fp16")),
    (1, 1, {}, ("fp32", "fp32")),
    (3, 1, {"data_parallel_sharding_strategy": "optim_grads_params"}, ("fp16", "fp32")),
    (4, 2, {"data_parallel_sharding_strategy": "optim_grads"}, ("fp16", "fp16")),
    (3, 1, {"use_torch_fsdp2": True}, ("fp16", "fp16")),
    (2, 1, {"data_parallel_sharding_strategy": "optim", "offload": 0.4}, ("fp16", "fp16")),
]


def build(layout: tuple[int, int, dict[str, Any], tuple[str, str]]) -> Any:
    """Return mesh, model chunks and optimizer; widths are such that blocks end where they will."""
    _, tp, given, (first, second) = layout
    sharing = dict(given)
    fraction = sharing.pop("offload", 0.0)
    parallel = ParallelConfig.resolve(tensor_model_parallel_size=tp)
    mesh = Mesh.create(parallel, torch.device("cpu"))
    config = TransformerConfig.resolve(
        num_layers=2, hidden_size=20, num_attention_heads=2, max_position_embeddings=8
    )
    chunks: list[nn.Module] = [*build_stages(config, mesh, make_stages(2, 1), vocab_size=6)]
    for chunk in chunks:
        rng.initialize(chunk, seed=1)
    optimizer = build_optimizer(
        OptimizerConfig.resolve(
            optimizer_cpu_offload=fraction > 0, optimizer_offload_fraction=fraction or 1.0
        ),
        chunks,
        mesh,
        PrecisionConfig.resolve(
            use_precision_aware_optimizer=True, exp_avg_dtype=first, exp_avg_sq_dtype=second
        ),
        DataParallelConfig.resolve(**sharing),
    )
    return mesh, chunks, optimizer


def train(optimizer: Optimizer) -> None:
    """Make two steps from gradients that replicas have alike."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(2):
        for buffer in optimizer.data_parallel.buffers:
            for parameter in buffer.parameters:
                assert parameter.grad is not None
                parameter.grad.copy_(torch.randn(parameter.shape, generator=generator))
        optimizer.step(1.0, lr=0.1, weight_decay=0.1)


def pass_on(rank: int, folder: str, number: int) -> bool:
    """Train or load, and save; return whether a copy for the background is the same."""
    mesh, chunks, optimizer = build(CHAIN[number])
    config = CheckpointConfig(save=f"{folder}/{number}", load=f"{folder}/{number - 1}")
    run = CheckpointedRun(config, mesh, chunks, optimizer, FACTS, silent)
    if number:
        load_checkpoint(run, ScheduleConfig())
    else:
        train(optimizer)
    saved = save_checkpoint(run, TrainState(iteration=1))
    assert saved.error is None, saved.error
    kept = items(chunks, optimizer, mesh, saving=True)
    same = True
    for one, other in zip(kept, stage(kept, HostBuffer()).items, strict=True):
        for piece, copied in zip(one.pieces, other.pieces, strict=True):
            assert copied.coded is None and copied.tensor.dtype == one.dtype
            same &= torch.equal(values(piece.tensor, piece.coded), copied.tensor)
    return same


def test_numbers_are_the_same_on_every_layout_and_in_every_format(
    pool: Pool, tmp_path: Path
) -> None:
    """None is so small beside its neighbours that another block could not hold it."""
    for number, (world, *_) in enumerate(CHAIN):
        assert all(pool.run(world, pass_on, str(tmp_path), number))
    with Checkpoint(tmp_path / "0" / "iter_0000001") as first:
        keys = [key for key in first.index.tensors if key.startswith("optimizer.exp_avg")]
        expected = {key: first.read(key) for key in keys}
    assert len(keys) > 20 and all(value.dtype == torch.float32 for value in expected.values())
    assert all(value.any() for value in expected.values())
    for number in range(1, len(CHAIN)):
        with Checkpoint(tmp_path / str(number) / "iter_0000001") as later:
            for key, value in expected.items():
                assert torch.equal(later.read(key), value), (number, key)


def resumed(rank: int, folder: str, number: int) -> bool:
    """Return whether a step after a load has the bits of one that nothing came before."""
    config = CheckpointConfig(save=folder, load=folder)
    found = []
    for loads in (False, True):
        mesh, chunks, optimizer = build(CHAIN[number])
        run = CheckpointedRun(config, mesh, chunks, optimizer, FACTS, silent)
        if loads:
            load_checkpoint(run, ScheduleConfig())
        else:
            step(optimizer, 1)
            save_checkpoint(run, TrainState(iteration=1))
        step(optimizer, 2)
        found.append([state.values().clone() for state in optimizer.tensors()])
        found[-1] += [flat.clone() for _, flat in optimizer.data_parallel.weights()]
    return all(map(torch.equal, *found))


def step(optimizer: Optimizer, seed: int) -> None:
    """Update from gradients of every size, on what this rank has of them."""
    generator = torch.Generator().manual_seed(seed)
    for _, flat in optimizer.data_parallel.gradients():
        sizes = torch.rand(flat.shape, generator=generator) * -30
        flat.copy_(torch.randn(flat.shape, generator=generator) * 2**sizes)
    optimizer.step(1.0, lr=0.1, weight_decay=0.1)


@pytest.mark.parametrize("number", [0, 2, 4])
def test_the_same_layout_goes_on_bit_for_bit(pool: Pool, tmp_path: Path, number: int) -> None:
    assert all(pool.run(CHAIN[number][0], resumed, str(tmp_path), number))
