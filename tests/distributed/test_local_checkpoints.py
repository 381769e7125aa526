"""Recovery checkpoints on the machines' own disks, which a lost machine takes with it.

Four ranks are two machines with a folder each. What is loaded gives the numbers of one process that
was never interrupted.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core import comm
from megatron.core.dist_checkpointing import catalog, local, local_reading
from megatron.core.dist_checkpointing.plan import Item, Piece
from megatron.core.grid import ParallelConfig
from megatron.core.mesh import Mesh
from megatron.core.sharding import box_slices
from tests.harness import Pool
from tests.programs import Ended, Rows, assert_rows_equal, by_hand, launch, metrics

PROGRAM = "tests.distributed.machines_program"
RUN = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --mock-data "
    "--position-embedding-type rope --tokenizer-type NullTokenizer --vocab-size 60 --fp64 "
    "--micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --train-iters 5 --eval-iters 0 "
    "--attention-dropout 0 --hidden-dropout 0 "
    "--log-interval 1 --num-workers 0 --device cpu --metrics-file metrics.jsonl"
)
SAVING = "--save save --load save --save-interval 100"
LOCAL = (
    "--non-persistent-save-interval 2 --non-persistent-ckpt-type local "
    "--non-persistent-local-ckpt-dir disks/{machine}"
)
LAYOUT = "--tensor-model-parallel-size 2 --use-distributed-optimizer"
COPIES = "--replication --replication-jump 2"


def run(pool: Pool, folder: Path, world: int, *words: str) -> list[Ended]:
    given = " ".join((RUN, *words)).split()
    return launch(pool, world, PROGRAM, *given, folder=folder, timeout=300)


def refused(folder: Path, *words: str) -> str:
    """Run on four ranks that a user's mistake ends, and return all that was printed."""
    given = " ".join((RUN, SAVING, LOCAL, *words)).split()
    run = by_hand(PROGRAM, given, folder=folder, world=4)
    assert run.codes(300) == [2] * 4
    return (folder / "out.0").read_text() + run.errors.read_text()


def crash(folder: Path) -> None:
    """Take the last regular checkpoint away, as if the run had not come to it."""
    shutil.rmtree(folder / "save" / "iter_0000005")
    (folder / "save" / catalog.TRACKER).unlink()


@pytest.fixture(scope="module")
def straight(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    folder = tmp_path_factory.mktemp("straight")
    assert run(pool, folder, 1)[0].code == 0
    return metrics(folder / "metrics.jsonl")


def check(folder: Path, ended: list[Ended], straight: Rows) -> None:
    """The run went on at 4 and did iteration 5 a second time."""
    assert [one.code for one in ended] == [0] * len(ended)
    printed = ended[0].out
    assert "training from iteration 4 to 5" in printed
    assert "recovery checkpoint disks/0/save-" in printed and "it is taken" in printed
    assert_rows_equal(metrics(folder / "metrics.jsonl"), [*straight, straight[4]])


def test_every_machine_keeps_its_own_and_all_go_on_together(
    pool: Pool, tmp_path: Path, straight: Rows
) -> None:
    assert run(pool, tmp_path, 4, SAVING, LOCAL, LAYOUT)[0].code == 0
    for machine, ranks in enumerate([(0, 1), (2, 3)]):
        (save,) = (tmp_path / "disks" / str(machine)).glob("save-*/iter_*")
        assert save.name.startswith("iter_0000004-")
        kept = sorted(path.name for path in save.iterdir())
        assert kept == [f"rank{r:05d}.{ending}" for r in ranks for ending in ("bin", "json")]
    crash(tmp_path)
    check(tmp_path, run(pool, tmp_path, 4, SAVING, LOCAL, LAYOUT), straight)


def test_a_lost_machine_without_copies_is_named(pool: Pool, tmp_path: Path) -> None:
    assert run(pool, tmp_path, 4, SAVING, LOCAL, LAYOUT)[0].code == 0
    shutil.rmtree(tmp_path / "disks" / "1")
    crash(tmp_path)
    printed = refused(tmp_path, LAYOUT, "--exit-on-missing-checkpoint")
    assert "no machine of this run has the part of rank 2 (2 parts are missing)" in printed
    assert "--load (save) holds no checkpoint" in printed


@pytest.mark.parametrize(
    ("lost", "world", "layout"),
    [
        pytest.param("1", 4, LAYOUT, marks=pytest.mark.slow),
        ("0", 4, "--pipeline-model-parallel-size 2"),
        ("1", 1, ""),
    ],
)
def test_with_copies_one_machine_may_be_lost_and_the_layout_another(
    pool: Pool, tmp_path: Path, straight: Rows, lost: str, world: int, layout: str
) -> None:
    assert run(pool, tmp_path, 4, SAVING, LOCAL, LAYOUT, COPIES)[0].code == 0
    shutil.rmtree(tmp_path / "disks" / lost)
    crash(tmp_path)
    again = COPIES if world == 4 else ""
    check(tmp_path, run(pool, tmp_path, world, SAVING, LOCAL, layout, again), straight)


def test_copies_in_the_folder_of_the_original_are_refused(tmp_path: Path) -> None:
    printed = refused(tmp_path, "--replication --replication-jump 1")
    assert "--replication-jump (1): ranks 0 and 1 would keep copies of each" in printed
    assert "on one machine no copy would survive it: leave out --replication" in printed


def test_a_copy_is_compared_where_it_is_read_and_replaced_where_it_is_cut_off(
    pool: Pool, tmp_path: Path, straight: Rows
) -> None:
    """Each machine has the parts of all ranks; another layout reads all of them everywhere."""
    assert run(pool, tmp_path, 4, SAVING, LOCAL, LAYOUT, COPIES)[0].code == 0
    crash(tmp_path)
    (copy,) = (tmp_path / "disks" / "1").glob("save-*/iter_*/rank00000.bin")
    whole = copy.read_bytes()
    copy.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    printed = refused(tmp_path, "--data-parallel-sharding-strategy no_shard", COPIES)
    assert "rank00000.bin from byte 0 does not match its checksum" in printed
    copy.write_bytes(whole[: len(whole) // 2])
    check(tmp_path, run(pool, tmp_path, 4, SAVING, LOCAL, COPIES), straight)


ROWS, COLUMNS = 64, 48


def fetch_in_chunks(rank: int, folder: str, chunk: int) -> tuple[int, int, int]:
    """Save half of the rows of a matrix on each of two machines, then fetch parts of all rows.

    Returns the most bytes that were sent at once, the bytes sent, and the bytes kept.
    """
    world, device = Mesh.create(ParallelConfig.resolve(), torch.device("cpu")).world, "cpu"
    half = ROWS // 2
    whole = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)
    rows = (rank * half, (rank + 1) * half)
    piece = Piece((rows, (0, COLUMNS)), whole[rows[0] : rows[1]].clone())
    item = Item("a", (ROWS, COLUMNS), torch.float32, (piece,))
    root, cpu = Path(folder) / str(rank), torch.device(device)
    local.save_local([item], root, 1, {}, world, cpu)
    found, _ = local.find_local(root, world)
    assert found is not None
    sent: list[int] = []
    broadcast = comm.broadcast

    def counted(data: Tensor, *words: Any) -> object:
        sent.append(data.nbytes)
        return broadcast(data, *words)

    # Rank 0 lacks the second half, and wants a few columns of its first three rows.
    wanted = ((0, half + 3), (5, 9)) if rank == 0 else ((0, ROWS), (0, COLUMNS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_reading, "CHUNK", chunk)
        patch.setattr(comm, "broadcast", counted)
        with local_reading.LocalCheckpoint(root, found, world, cpu) as checkpoint:
            checkpoint.fetch([("a", wanted)])
            kept = sum(
                memory.untyped_storage().nbytes()
                for parts in checkpoint._received.values()
                for _, memory in parts
            )
            assert torch.equal(checkpoint.read("a", wanted), whole[box_slices(wanted)])
    return max(sent), sum(sent), kept


@pytest.mark.parametrize("chunk", [1024, 100, 4])
def test_what_is_sent_is_bounded_by_a_chunk_and_what_is_kept_by_what_is_asked_for(
    pool: Pool, tmp_path: Path, chunk: int
) -> None:
    first, second = pool.run(2, fetch_in_chunks, str(tmp_path), chunk)
    assert first[:2] == second[:2] and first[0] <= chunk
    assert first[2] == 3 * 4 * 4
    assert second[2] == ROWS * COLUMNS * 4 // 2
    # All of the first half, and of the second no more than the chunks that hold what is wanted.
    assert first[1] <= second[2] + 3 * COLUMNS * 4 + chunk
