"""Checkpoints of several ranks: resumed on the same layout bit for bit, on another as one process.

Whole runs of pretrain_gpt.py on ranks of the worker pool, with made-up tokens; and saves and loads
of a small model alone, where one rank fails.
"""

import errno
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megatron.core import rng
from megatron.core.dist_checkpointing import save
from megatron.core.dist_checkpointing.format import Index
from megatron.core.dist_checkpointing.reader import Checkpoint, DamagedError
from megatron.core.dist_checkpointing.staging import Staged
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
from megatron.training.checkpoints.facts import RunFacts
from megatron.training.checkpoints.load import load_checkpoint
from megatron.training.checkpoints.run import CheckpointedRun
from megatron.training.checkpoints.save import save_checkpoint
from megatron.training.state import TrainState
from tests.harness import Pool
from tests.programs import assert_rows_equal, launch, metrics

# A tied, padded vocabulary, and fewer query groups than the most tensor-parallel ranks.
COMMON = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --swiglu "
    "--position-embedding-type rope --group-query-attention --num-query-groups 2 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 101 --make-vocab-size-divisible-by 3 "
    "--micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --train-iters 4 --eval-iters 1 "
    "--eval-interval 2 --log-interval 1 --num-workers 0 --fp64 --device cpu"
)
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
LAYOUTS = {
    "serial": (1, ""),
    "tp2 pp2": (4, f"{TP2} {PP2} --sequence-parallel"),
    "pp2 v": (2, f"{PP2} --pipeline-schedule zb-v"),
    "tp4": (4, "--tensor-model-parallel-size 4"),
    "pp2 vpp2 dp2": (4, f"{PP2} --num-virtual-stages-per-pipeline-rank 2 --overlap-grad-reduce"),
    "cp2 dp2": (4, "--context-parallel-size 2"),
    # What replicas share out is no part of a layout, nor are words that begin with v.
    "dp2": (2, "--use-distributed-optimizer --overlap-param-gather"),
    "dp4": (4, "--use-megatron-fsdp --overlap-grad-reduce"),
    "tp2 dp2": (4, f"{TP2} --data-parallel-sharding-strategy optim_grads --sequence-parallel"),
    "dp2 v-torch": (2, "--use-torch-fsdp2"),
    "tp2 dp2 v-torch": (4, f"{TP2} --use-torch-fsdp2 --sequence-parallel"),
    "dp4 v2-instances": (4, "--use-distributed-optimizer --num-distributed-optimizer-instances 2"),
}


def train(pool: Pool, layout: str, folder: Path, *more: object) -> str:
    """Run on a layout, add to the folder's metrics, and return what rank 0 printed."""
    folder.mkdir(exist_ok=True)
    world, words = LAYOUTS[layout]
    common = f"{COMMON} {words} --metrics-file metrics.jsonl --save save".split()
    ended = launch(pool, world, "pretrain_gpt", *common, *more, folder=folder)
    assert [one.code for one in ended] == [0] * world
    return ended[0].out


def stored(folder: Path, iteration: int) -> dict[str, Tensor]:
    """Return the weights and optimizer states of a checkpoint."""
    with Checkpoint(folder / "save" / f"iter_{iteration:07d}") as checkpoint:
        keys = [key for key in checkpoint.index.tensors if not key.startswith("random.")]
        return {key: checkpoint.read(key) for key in keys}


@pytest.fixture(scope="module")
def straight(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of one process that nothing interrupted."""
    folder = tmp_path_factory.mktemp("straight")
    train(pool, "serial", folder, *NO_DROPOUT.split(), "--save-interval", 2)
    return folder


def assert_equal(found: Path, expected: Path) -> None:
    """Compare metrics, and the weights and states of the last checkpoint, to 1e-10."""
    assert_rows_equal(metrics(found / "metrics.jsonl"), metrics(expected / "metrics.jsonl"))
    ours, theirs = stored(found, 4), stored(expected, 4)
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        largest = float(tensor.abs().max())
        torch.testing.assert_close(ours[key], tensor, rtol=0, atol=1e-10 * largest)


@pytest.mark.parametrize("layout", ["tp2 pp2", "pp2 v", "cp2 dp2", "dp2", "dp4", "dp2 v-torch"])
def test_the_same_layout_goes_on_bit_for_bit_with_dropout(
    pool: Pool, tmp_path: Path, layout: str
) -> None:
    dropout = ("--attention-dropout", 0.1, "--hidden-dropout", 0.1)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(pool, layout, whole, *dropout)
    train(pool, layout, parts, *dropout, "--exit-interval", 2)
    printed = train(pool, layout, parts, *dropout, "--load", "save")
    assert "weights loaded, optimizer loaded, random loaded, progress loaded" in printed
    assert metrics(parts / "metrics.jsonl") == metrics(whole / "metrics.jsonl")
    ours, theirs = stored(parts, 4), stored(whole, 4)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("tp2 pp2", "serial"),
        ("pp2 v", "cp2 dp2"),
        ("tp4", "pp2 vpp2 dp2"),
        ("pp2 vpp2 dp2", "tp2 pp2"),
        ("serial", "pp2 v"),
        ("dp2", "serial"),
        ("tp2 pp2", "dp4"),
        ("dp4", "tp2 dp2"),
        ("tp2 dp2", "dp4 v2-instances"),
        ("dp4 v2-instances", "pp2 v"),
        ("dp4", "dp2 v-torch"),
        ("tp2 dp2 v-torch", "pp2 vpp2 dp2"),
    ],
)
def test_another_layout_goes_on_as_one_process(
    pool: Pool, straight: Path, tmp_path: Path, before: str, after: str
) -> None:
    train(pool, before, tmp_path, *NO_DROPOUT.split(), "--exit-interval", 2)
    kept = stored(tmp_path, 2)
    assert {key: tuple(tensor.shape) for key, tensor in kept.items()} == {
        key: tuple(tensor.shape) for key, tensor in stored(straight, 2).items()
    }
    printed = train(pool, after, tmp_path, *NO_DROPOUT.split(), "--load", "save")
    assert "weights loaded, optimizer loaded" in printed
    # The sizes as this file names them, without the schedule.
    was, now = (
        " ".join(word for word in name.split() if not word.startswith("v"))
        for name in (before.replace("serial", "one rank"), after.replace("serial", "one rank"))
    )
    assert f"WARNING: layout {was} -> {now}" in printed
    assert_equal(tmp_path, straight)


def build(mesh: Mesh) -> tuple[list[nn.Module], Optimizer]:
    config = TransformerConfig.resolve(
        num_layers=2, hidden_size=16, num_attention_heads=2, max_position_embeddings=8
    )
    stages = make_stages(2, mesh.pp.size)
    mine = [stages[mesh.pp.coordinate]]
    chunks: list[nn.Module] = [*build_stages(config, mesh, mine, vocab_size=6)]
    for chunk in chunks:
        rng.initialize(chunk, seed=1)
    return chunks, build_optimizer(
        OptimizerConfig.resolve(), chunks, mesh, PrecisionConfig.resolve()
    )


FACTS = RunFacts(
    config={}, schedule=None, tokenizer="", vocabulary=6, vocabulary_rows=6, objective="tokens"
)


def save_while_one_disk_is_full(rank: int, folder: str, full: int) -> list[str | None]:
    """Save three times, the second time with a full disk on one rank; return the errors."""
    mesh = Mesh.create(ParallelConfig.resolve(pipeline_model_parallel_size=2), torch.device("cpu"))
    chunks, optimizer = build(mesh)
    run = CheckpointedRun(CheckpointConfig(save=folder), mesh, chunks, optimizer, FACTS, silent)
    write, errors = save.write, []
    for iteration in (1, 2, 3):

        def attempt(staged: Staged, partial: Path, rank: int, now: int = iteration) -> Index:
            if now == 2 and rank == full:
                raise OSError(errno.ENOSPC, "no space left")
            return write(staged, partial, rank)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(save, "write", attempt)
            saved = save_checkpoint(run, TrainState(iteration))
        errors.append(saved.error)
        assert (saved.folder is None) == (saved.error is not None)
    return errors


@pytest.mark.parametrize("full", [0, 1])
def test_a_disk_that_is_full_on_one_rank_fails_the_save_on_all(
    pool: Pool, tmp_path: Path, full: int
) -> None:
    here, there = pool.run(2, save_while_one_disk_is_full, str(tmp_path), full)
    assert here == there == [None, f"rank {full}: [Errno 28] no space left", None]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "iter_0000001",
        "iter_0000003",
        "latest_checkpointed_iteration.txt",
    ]


def load_what_is_damaged(rank: int, folder: str) -> tuple[str, str]:
    """Load a checkpoint by name and return the error; load the newest, and return which it was."""
    mesh = Mesh.create(ParallelConfig.resolve(pipeline_model_parallel_size=2), torch.device("cpu"))
    chunks, optimizer = build(mesh)
    before = [parameter.clone() for chunk in chunks for parameter in chunk.parameters()]
    schedule, named = ScheduleConfig(lr=0.1), CheckpointConfig(load=folder, ckpt_step=3)
    run = CheckpointedRun(named, mesh, chunks, optimizer, FACTS, silent)
    with pytest.raises(DamagedError) as caught:
        load_checkpoint(run, schedule)
    after = [parameter for chunk in chunks for parameter in chunk.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    loaded = load_checkpoint(replace(run, config=CheckpointConfig(load=folder)), schedule)
    assert loaded.folder is not None
    return str(caught.value), loaded.folder.name


def test_damage_to_one_rank_s_file_is_known_to_all_who_take_the_one_before(
    pool: Pool, tmp_path: Path
) -> None:
    pool.run(2, save_while_one_disk_is_full, str(tmp_path), 2)  # none is
    file = tmp_path / "iter_0000003" / "rank00001.bin"
    content = bytearray(file.read_bytes())
    content[8] ^= 1
    file.write_bytes(content)
    here, there = pool.run(2, load_what_is_damaged, str(tmp_path))
    assert here == there
    assert "rank00001.bin from byte 0 does not match its checksum" in here[0]
    assert here[1] == "iter_0000002"


def save_where_one_rank_fails(rank: int, folder: str, failing: int) -> list[str]:
    """Save with faults that are none of the files, on one rank; return what was said."""
    mesh = Mesh.create(ParallelConfig.resolve(pipeline_model_parallel_size=2), torch.device("cpu"))
    chunks, optimizer = build(mesh)
    lines = list[str]()
    config = CheckpointConfig(save=folder)
    run = CheckpointedRun(config, mesh, chunks, optimizer, FACTS, lines.append)

    def fails(*words: object) -> Index:
        raise MemoryError("no memory for a chunk")

    def unknown(*words: object) -> object:
        raise OSError(errno.EIO, "nobody knows")

    for iteration, (name, planted) in enumerate([("write", fails), ("lacking_space", unknown)]):
        with pytest.MonkeyPatch.context() as patch:
            if rank == failing:
                patch.setattr(save, name, planted)
            save_checkpoint(run, TrainState(iteration))
    save_checkpoint(run, TrainState(2))
    return [line for line in lines if "WARNING" in line]


def test_a_fault_on_one_rank_fails_the_save_on_all_and_nothing_else(
    pool: Pool, tmp_path: Path
) -> None:
    here, there = pool.run(2, save_where_one_rank_fails, str(tmp_path / "second"), 1)
    assert here == there and len(here) == 1  # the space is looked at by rank 0
    assert "iteration 0" in here[0] and "rank 1: MemoryError: no memory for a chunk" in here[0]
    here, there = pool.run(2, save_where_one_rank_fails, str(tmp_path / "first"), 0)
    assert here == there and len(here) == 2
    assert "iteration 1" in here[1] and "rank 0: [Errno 5] nobody knows" in here[1]
    for folder in ("first", "second"):
        names = [path.name for path in sorted((tmp_path / folder).glob("iter_*"))]
        assert names == (
            ["iter_0000002"] if folder == "first" else ["iter_0000001", "iter_0000002"]
        )
