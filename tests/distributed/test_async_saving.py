"""Saves beside training on several ranks: what a save at once would have stored, and its failures.

Whole runs of pretrain_gpt.py on ranks of the worker pool, and a small model alone where a disk is
full.
"""

import errno
import os
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

import pretrain_gpt
from megatron.core.dist_checkpointing import background, priority
from megatron.core.dist_checkpointing.format import read_index
from megatron.core.dist_checkpointing.plan import Item
from megatron.core.dist_checkpointing.reader import Checkpoint
from megatron.core.dist_checkpointing.staging import HostBuffer, Staged
from megatron.core.grid import ParallelConfig
from megatron.core.mesh import Mesh
from megatron.core.utils import UserError
from megatron.training.checkpoint_config import CheckpointConfig
from megatron.training.checkpoints import random_states, saver
from megatron.training.checkpoints.run import CheckpointedRun
from megatron.training.checkpoints.saver import Saver
from megatron.training.failing.failure import RunFailed
from megatron.training.state import TrainState
from tests.distributed.test_checkpoints import FACTS, build
from tests.harness import Pool
from tests.programs import launch

RUN = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--position-embedding-type rope --mock-data --tokenizer-type NullTokenizer --vocab-size 101 "
    "--micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --train-iters 4 --eval-iters 1 "
    "--log-interval 1 --num-workers 0 --bf16 --device cpu --save save --save-interval 1"
)
LATE = 0.5
"""Seconds: several times what an iteration takes here."""
PP2 = "--pipeline-model-parallel-size 2"
SCALED = "--use-precision-aware-optimizer --exp-avg-dtype fp16 --exp-avg-sq-dtype fp16"
LAYOUTS = {
    "pp2": (2, PP2),
    "dp2 optim": (2, "--use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce"),
    "dp2 optim, moments with scales": (2, f"--use-distributed-optimizer {SCALED}"),
    "pp2 dp2 optim": (4, f"{PP2} --use-distributed-optimizer"),
    "dp4 all": (4, "--use-megatron-fsdp --overlap-grad-reduce --log-memory-interval 4"),
}


def main(words: list[str]) -> int:
    """Train where copies for a save are made long after the next update would be due."""
    stage_now = background.stage

    def stage_late(items: Iterable[Item], buffer: HostBuffer | None = None) -> Staged:
        if buffer is not None:
            time.sleep(LATE)
        return stage_now(items, buffer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background, "stage", stage_late)
        return pretrain_gpt.main(words)


def saved(
    pool: Pool, layout: str, folder: Path, *more: str, program: str = "pretrain_gpt"
) -> tuple[dict[int, str], str]:
    """Run on a layout; return the hash of each iteration's checkpoint, and what rank 0 printed."""
    folder.mkdir()
    world, words = LAYOUTS[layout]
    ended = launch(pool, world, program, *RUN.split(), *words.split(), *more, folder=folder)
    assert [one.code for one in ended] == [0] * world
    assert (folder / "save" / "latest_checkpointed_iteration.txt").read_text() == "4"
    hashes = {
        iteration: read_index(folder / "save" / f"iter_{iteration:07d}").hash
        for iteration in range(1, 5)
    }
    return hashes, ended[0].out


@pytest.mark.parametrize(
    "layout",
    [
        "pp2 dp2 optim",
        "dp4 all",
        pytest.param("pp2", marks=pytest.mark.slow),
        pytest.param("dp2 optim", marks=pytest.mark.slow),
    ],
)
def test_beside_training_the_same_is_stored(pool: Pool, tmp_path: Path, layout: str) -> None:
    """Copies are slow, so that they hold what the next update makes unless it waits for them."""
    at_once, _ = saved(pool, layout, tmp_path / "at_once")
    beside, printed = saved(pool, layout, tmp_path / "beside", "--async-save", program=__name__)
    assert beside == at_once and len(set(at_once.values())) == 4
    assert printed.count("the checkpoint is written meanwhile") == 3  # the last one is waited for
    assert printed.count("of which training waited") == 3


def test_less_memory_for_copies_changes_no_content(pool: Pool, tmp_path: Path) -> None:
    words = ("--async-save", "--async-save-host-gib", "0.00001")
    assert saved(pool, "pp2", tmp_path / "a", *words)[0] == saved(pool, "pp2", tmp_path / "b")[0]


def test_without_sharing_the_first_replica_writes_all(pool: Pool, tmp_path: Path) -> None:
    saved(pool, "pp2 dp2 optim", tmp_path / "shared")
    saved(pool, "pp2 dp2 optim", tmp_path / "alone", "--no-ckpt-fully-parallel-save")
    tensors = []
    for way in ("shared", "alone"):
        with Checkpoint(tmp_path / way / "save" / "iter_0000004") as checkpoint:
            # Shares of states are everybody's own, weights are what both replicas hold.
            weights = [
                box.file
                for key, tensor in checkpoint.tensors.items()
                for box in tensor.boxes
                if key.startswith("model.")
            ]
            assert len(set(weights)) == (4 if way == "shared" else 2)
            tensors.append({key: checkpoint.read(key) for key in checkpoint.tensors})
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensors[0][key], tensors[1][key]) for key in tensors[0])


def save_beside_a_full_disk(rank: int, folder: str, full: int, stop: bool) -> list[str]:
    """Save three times beside training, the second time with a full disk on one rank."""
    mesh = Mesh.create(ParallelConfig.resolve(pipeline_model_parallel_size=2), torch.device("cpu"))
    chunks, optimizer = build(mesh)
    config = CheckpointConfig.resolve(save=folder, async_save=True, exit_on_failed_save=stop)
    lines, seen = list[str](), list[int]()
    run = CheckpointedRun(config, mesh, chunks, optimizer, FACTS, lines.append)
    run_saver = Saver(run, lambda _, of: seen.append(of.iteration))

    def fails(descriptor: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    state = TrainState()
    for iteration in (1, 2, 3):
        run_saver.finish()
        state.iteration = iteration  # the state goes on changing while it is saved
        with pytest.MonkeyPatch.context() as patch:
            if iteration == 2 and rank == full:
                patch.setattr(os, "pwrite", fails)
            run_saver.save(state, last=False)
            if iteration == 2:
                try:
                    run_saver.finish()
                except RunFailed as error:
                    return [str(error)]
    while len(seen) < 2:
        state.iteration += 1
        run_saver.look()
    run_saver.save(state, last=True)
    assert seen == [1, 3, state.iteration]
    return [line for line in lines if "WARNING" in line]


@pytest.mark.parametrize(("full", "stop"), [(0, False), (1, False), (1, True)])
def test_a_disk_that_is_full_on_one_rank_fails_the_save_on_all(
    pool: Pool, tmp_path: Path, full: int, stop: bool
) -> None:
    here, there = pool.run(2, save_beside_a_full_disk, str(tmp_path), full, stop)
    assert here == there and len(here) == 1
    assert f"rank {full}: [Errno 28] no space left" in here[0]
    kept = sorted(path.name for path in tmp_path.glob("iter_*"))
    assert kept[0] == "iter_0000001" and "iter_0000002" not in kept
    assert not any(name.endswith(".partial") for name in kept)
    assert (len(kept) == 1) == stop
    for name in kept:
        with Checkpoint(tmp_path / name) as checkpoint:
            assert checkpoint.damages() == []


def fail_beside_a_save(
    rank: int, folder: str, alike: bool, full: int | None = None
) -> tuple[list[int], list[str]]:
    """Fail on all ranks, or on one alone, while a save is under way that one rank is slow with.

    The disk of rank ``full`` is. Returns what was saved, and what was said of it after the failure.
    """
    mesh = Mesh.create(ParallelConfig.resolve(pipeline_model_parallel_size=2), torch.device("cpu"))
    chunks, optimizer = build(mesh)
    config, seen = CheckpointConfig.resolve(save=folder, async_save=True), list[int]()
    lines: list[str] = []

    def saved(_: Path, of: TrainState) -> None:
        seen.append(of.iteration)

    run = CheckpointedRun(config, mesh, chunks, optimizer, FACTS, lines.append)
    run_saver = Saver(run, saved)
    write = os.pwrite

    def slow(descriptor: int, data: memoryview, offset: int) -> int:
        time.sleep(0.5 * rank)
        if rank == full:
            raise OSError(errno.ENOSPC, "no space left")
        return write(descriptor, data, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", slow)
        if full is not None:
            patch.setattr(saver, "PATIENCE", 1.0)
        run_saver.save(TrainState(7), last=False)
        before = len(lines)
        run_saver.rescue(alike=alike)
    # A rank that ends takes the others with it: by now it must be there.
    if alike and full is None:
        assert (Path(folder) / "iter_0000007").exists()
    return seen, lines[before:]


@pytest.mark.parametrize("alike", [True, False])
def test_a_failure_of_all_ranks_finishes_the_save_under_way(
    pool: Pool, tmp_path: Path, alike: bool
) -> None:
    first, second = pool.run(2, fail_beside_a_save, str(tmp_path), alike)
    assert first[0] == ([7] if alike else []) and second[0] == []
    said = "is saved" if alike else "is given up"
    assert [said in line and "iteration 7" in line for line in first[1]] == [True]
    assert (tmp_path / "latest_checkpointed_iteration.txt").exists() == alike


def test_a_part_that_does_not_come_is_named(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(2, fail_beside_a_save, str(tmp_path), True, 1)
    assert first[0] == second[0] == []
    assert "was not finished: no part has come within 1 s from rank 1" in first[1][-1]
    assert "was not finished: rank 1: [Errno 28] no space left" in second[1][-1]


def begin_badly(rank: int, folder: str) -> list[str]:
    """Have rank 1 alone unable to begin: with its priorities, then with its part of a save."""
    mesh = Mesh.create(ParallelConfig.resolve(pipeline_model_parallel_size=2), torch.device("cpu"))
    chunks, optimizer = build(mesh)
    config, lines = CheckpointConfig.resolve(save=folder, async_save=True), list[str]()
    run = CheckpointedRun(config, mesh, chunks, optimizer, FACTS, lines.append)

    def short(device: torch.device) -> None:
        raise MemoryError("so many bytes")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(priority, "refusal", lambda *_: "not allowed")
        with pytest.raises(UserError) as refused:
            Saver(run, lambda *_: None)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(random_states, "pack", short)
        Saver(run, lambda *_: None).save(TrainState(7), last=False)
    return [str(refused.value), lines[-1]]


def test_a_rank_that_cannot_begin_stops_all(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(2, begin_badly, str(tmp_path))
    assert first == second
    assert "rank 1: --async-ckpt-cpu-priority 10" in first[0] and "not allowed" in first[0]
    assert "saving iteration 7" in first[1] and "rank 1: MemoryError: so many bytes" in first[1]
