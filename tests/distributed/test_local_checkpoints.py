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
from megatron.core.dist_checkpointing import catalog, local, local_copies, local_reading, machine
from megatron.core.dist_checkpointing.local_copies import Copies
from megatron.core.dist_checkpointing.local_reading import LocalCheckpoint
from megatron.core.dist_checkpointing.plan import Item, Piece
from megatron.core.dist_checkpointing.reader import DamagedError
from megatron.core.dist_checkpointing.save import SaveError
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
    for disk, ranks in enumerate([(0, 1), (2, 3)]):
        (save,) = (tmp_path / "disks" / str(disk)).glob("save-*/iter_*")
        assert save.name.startswith("iter_0000004-")
        kept = sorted(path.name for path in save.iterdir())
        assert kept == [f"rank{r:05d}.{ending}" for r in ranks for ending in ("bin", "json")]
    crash(tmp_path)
    check(tmp_path, run(pool, tmp_path, 4, SAVING, LOCAL, LAYOUT), straight)


def test_a_lost_machine_without_copies_is_named(pool: Pool, tmp_path: Path) -> None:
    assert run(pool, tmp_path, 4, SAVING, LOCAL, LAYOUT)[0].code == 0
    shutil.rmtree(tmp_path / "disks" / "1")
    crash(tmp_path)
    printed = refused(tmp_path, LAYOUT)  # starting over would be a surprise
    assert "no machine of this run has the part of rank 2 (2 parts are missing)" in printed
    assert "save holds no complete checkpoint" in printed


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


def test_a_copy_that_is_damaged_or_cut_off_is_read_from_a_partner(
    pool: Pool, tmp_path: Path, straight: Rows
) -> None:
    """Each machine has the parts of all ranks; another layout reads all of them everywhere."""
    assert run(pool, tmp_path, 4, SAVING, LOCAL, LAYOUT, COPIES)[0].code == 0
    crash(tmp_path)
    copy = {
        (machine, rank): next(
            (tmp_path / "disks").glob(f"{machine}/save-*/iter_*/rank0000{rank}.bin")
        )
        for machine in (0, 1)
        for rank in (0, 1)
    }
    for place in ((1, 0), (0, 1)):
        flip(copy[place])
    whole = copy[1, 1].read_bytes()
    copy[1, 1].write_bytes(whole[: len(whole) // 2])
    printed = refused(tmp_path, "--data-parallel-sharding-strategy no_shard", COPIES)
    assert "is damaged: no copy of rank00001.bin is as it was written" in printed
    assert "rank00001.bin from byte 0 does not match its checksum" in printed
    copy[1, 1].write_bytes(whole)
    ended = run(pool, tmp_path, 4, SAVING, LOCAL, COPIES)
    check(tmp_path, ended, straight)
    for rank in (0, 1):
        said = f"rank0000{rank}.bin from byte 0 does not match its checksum; another copy is read"
        assert said in ended[0].out


def flip(file: Path) -> None:
    """Change the first bit of a file."""
    data = file.read_bytes()
    file.write_bytes(bytes([data[0] ^ 1]) + data[1:])


def compare_copies(
    rank: int, root: str, machines: int, flipped: list[str], is_unclosed: bool
) -> tuple[Any, ...]:
    """Save a half of a matrix on each rank, with a copy if there are two folders, and compare.

    ``flipped`` files are damaged in between. Returns what was compared here, what is sound, who
    sends each file, and what is wrong; or an error.
    """
    world, cpu = (
        Mesh.create(ParallelConfig.resolve(), torch.device("cpu")).world,
        torch.device("cpu"),
    )
    whole = torch.arange(12.0).view(4, 3)
    piece = Piece(((2 * rank, 2 * rank + 2), (0, 3)), whole[2 * rank : 2 * rank + 2].clone())
    items, home = [Item("a", (4, 3), torch.float32, (piece,))], Path(root) / str(rank % machines)

    def unclosed(self: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if is_unclosed and rank == 1:
            patch.setattr(local_copies._Copy, "close", unclosed)
        try:
            folder, _ = local.save_local(items, home, 1, {}, world, cpu, Copies(1, machines))
        except SaveError as error:
            return (str(error),)
    if rank == 0:
        for name in flipped:
            flip(next(Path(root).glob(name)))
    comm.barrier(world)
    found, _ = local.find_local(home, world)
    assert found is not None and found.own == {"rank00000.bin", "rank00001.bin"}
    checked = found.checked(rank)
    with LocalCheckpoint(home, found, world, cpu) as checkpoint:
        try:
            sound, problems = checkpoint.compare()
        except DamagedError as error:
            return (checked, str(error))
    with LocalCheckpoint(home, sound, world, cpu) as checkpoint:
        checkpoint.fetch([("a", ((0, 4), (0, 3)))])
        assert torch.equal(checkpoint.read("a"), whole)
    return checked, sorted(sound.own), sound.holders, problems


def test_wrong_copies_count_as_absent_until_none_is_left(pool: Pool, tmp_path: Path) -> None:
    files = ["rank00000.bin", "rank00001.bin"]
    both = pool.run(2, compare_copies, str(tmp_path / "a"), 2, [], False)
    assert [one[1] for one in both] == [files] * 2 and both[0][3] == []
    flipped = ["0/*/rank00000.bin", "1/*/rank00001.bin"]
    first, second = pool.run(2, compare_copies, str(tmp_path / "b"), 2, flipped, False)
    assert (first[1], second[1]) == (files[1:], files[:1])
    assert first[2] == second[2] == {files[0]: 1, files[1]: 0}
    wrong = "from byte 0 does not match its checksum"
    assert first[3] == [f"rank {r}: a: rank0000{r}.bin {wrong}" for r in (0, 1)]
    first, second = pool.run(
        2, compare_copies, str(tmp_path / "c"), 2, [*flipped, "1/*/rank00000.bin"], False
    )
    assert first[1].split("damaged:")[1] == second[1].split("damaged:")[1]
    assert "no copy of rank00000.bin is as it was written" in first[1]


def test_ranks_of_one_machine_share_what_they_compare_and_no_others(
    pool: Pool, tmp_path: Path
) -> None:
    """All processes here have one name of the machine; the folders differ, or do not."""
    files = ["rank00000.bin", "rank00001.bin"]
    apart = pool.run(2, compare_copies, str(tmp_path / "a"), 2, [], False)
    assert [one[0] for one in apart] == [files] * 2
    beside = pool.run(2, compare_copies, str(tmp_path / "b"), 1, [], False)
    assert [one[0] for one in beside] == [files[:1], files[1:]]
    elsewhere = pool.run(2, compare_elsewhere, str(tmp_path / "c"))
    assert [one[0] for one in elsewhere] == [files] * 2


def compare_elsewhere(rank: int, root: str) -> tuple[Any, ...]:
    """Compare copies on two machines of one name that have the folder at the same path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "started", lambda: f"start {rank}")
        return compare_copies(rank, root, 1, [], False)


def test_a_copy_whose_file_cannot_be_closed_fails_the_save_on_all(
    pool: Pool, tmp_path: Path
) -> None:
    first, second = pool.run(2, compare_copies, str(tmp_path), 2, [], True)
    assert first == second == ("rank 1: [Errno 28] No space left on device",)


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
        with LocalCheckpoint(root, found, world, cpu) as checkpoint:
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
