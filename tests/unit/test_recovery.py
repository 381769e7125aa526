"""Recovery checkpoints: what their flags may say, and which parts of local ones make a whole."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing import local, machine
from megatron.core.dist_checkpointing.format import CheckpointError
from megatron.core.dist_checkpointing.local_copies import Copies
from megatron.core.dist_checkpointing.local_reading import LocalCheckpoint
from megatron.core.dist_checkpointing.reader import DamagedError
from megatron.core.dist_checkpointing.save import SaveError
from megatron.core.mesh import Mesh
from megatron.core.utils import UserError
from megatron.training.arguments import parse
from megatron.training.checkpoints.recovery import Local, open_source
from megatron.training.checkpoints.source import Source
from tests.unit.checkpoint_files import item

BASE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 1 --train-iters 10 --lr 1e-3 --mock-data"
)
LOCAL = (
    "--save a/b --non-persistent-save-interval 2 --non-persistent-ckpt-type local "
    "--non-persistent-local-ckpt-dir c/d"
)
WORLD = Mesh.serial().world
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--non-persistent-save-interval 0", "--non-persistent-save-interval (0)"),
        ("--non-persistent-ckpt-type in_memory", "in /dev/shm"),
        ("--non-persistent-ckpt-type local", "needs --non-persistent-local-ckpt-dir"),
        ("--replication", "--replication needs --replication-jump"),
        ("--replication-factor 1", "--replication-factor (1) must be at least 2"),
        (f"{LOCAL} --replication --replication-jump 3", "8 processes are no multiple of 6"),
        (f"{LOCAL} --replication --replication-jump 3", "survive it: leave out --replication"),
    ],
)
def test_flags_that_contradict_are_refused(words: str, named: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(f"{BASE} {words}".split(), world_size=8)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("words", "note"),
    [
        ("--non-persistent-save-interval 2", "--non-persistent-save-interval (no --save)"),
        ("--replication --replication-jump 1", "--replication (no --non-persistent-save-interval)"),
        ("--replication-jump 1", "--replication-jump (no --replication)"),
        (
            "--save a/b --non-persistent-save-interval 2 --replication --replication-jump 1",
            "--replication (--non-persistent-ckpt-type is not local)",
        ),
        (
            "--non-persistent-global-ckpt-dir a/b",
            "--non-persistent-global-ckpt-dir (no --non-persistent-save-interval, and no --load)",
        ),
    ],
)
def test_settings_without_effect_are_named(words: str, note: str) -> None:
    assert note in "\n".join(parse(f"{BASE} {words}".split(), world_size=1).lines())


def test_partners_are_on_neighbouring_machines() -> None:
    pairs = {Copies(2, 2).partners(rank) for rank in range(8)}
    assert pairs == {(0, 2), (1, 3), (4, 6), (5, 7)}
    assert {Copies(2, 3).partners(rank) for rank in range(6)} == {(0, 2, 4), (1, 3, 5)}
    assert Copies().partners(5) == (5,)


def save(root: Path, iteration: int, value: float) -> Path:
    items = [item("a", torch.full((3, 5), value))]
    return local.save_local(items, root, iteration, {}, WORLD, CPU)[0]


def test_a_local_one_replaces_the_last_when_it_is_there(tmp_path: Path) -> None:
    save(tmp_path, 2, 2.0)
    folder = save(tmp_path, 4, 4.0)
    assert list(tmp_path.iterdir()) == [folder]
    found, _ = local.find_local(tmp_path, WORLD)
    assert found is not None and found.iteration == 4
    with LocalCheckpoint(tmp_path, found, WORLD, CPU) as checkpoint:
        assert checkpoint.damages() == []
        assert torch.equal(checkpoint.read("a"), torch.full((3, 5), 4.0))
    assert local.find_local(tmp_path, WORLD, 2) == (None, {})


@pytest.mark.parametrize("damage", ["no part", "no file", "short file", "bad part"])
def test_a_part_that_is_not_whole_is_none(tmp_path: Path, damage: str) -> None:
    folder = save(tmp_path, 2, 2.0)
    part, file = folder / "rank00000.json", folder / "rank00000.bin"
    if damage == "no part":
        part.unlink()
    elif damage == "no file":
        file.unlink()
    elif damage == "short file":
        os.truncate(file, 10)
    else:
        part.write_text(part.read_text().replace('"ranks"', '"Ranks"'))
    lacks = "no rank finished its part" if damage == "no part" else "has the part of rank 0"
    found, ignored = local.find_local(tmp_path, WORLD)
    assert found is None and lacks in ignored[folder.name]


@pytest.mark.parametrize("damage", ["a flipped bit", "a folder in its place"])
def test_what_is_damaged_and_has_no_copy_is_named(tmp_path: Path, damage: str) -> None:
    folder = save(tmp_path, 2, 2.0)
    found, _ = local.find_local(tmp_path, WORLD)
    assert found is not None
    with LocalCheckpoint(tmp_path, found, WORLD, CPU) as checkpoint:
        assert checkpoint.compare() == (found, [])
    if damage == "a flipped bit":
        with open(folder / "rank00000.bin", "r+b") as file:
            file.write(b"\1")
        wrong = "a: rank00000.bin from byte 0 does not match its checksum"
    else:
        (folder / "rank00000.bin").unlink()
        (folder / "rank00000.bin").mkdir()
        wrong = "Is a directory"
    with (
        LocalCheckpoint(tmp_path, found, WORLD, CPU) as checkpoint,
        pytest.raises(DamagedError, match=f"no copy of rank00000.bin is as it was.*\n.*{wrong}"),
    ):
        checkpoint.compare()


def test_a_box_of_another_rank_than_the_stored_tensors_is_left_to_the_listing(
    tmp_path: Path,
) -> None:
    save(tmp_path, 2, 2.0)
    found, _ = local.find_local(tmp_path, WORLD)
    assert found is not None
    with LocalCheckpoint(tmp_path, found, WORLD, CPU) as checkpoint:
        checkpoint.fetch([("a", ((0, 3),)), ("a", ((0, 3), (0, 2), (0, 1)))])


def test_a_disk_that_cannot_be_read_holds_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 2, 2.0)

    def dead(folder: Path) -> list[Path]:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(local, "_saves", dead)
    found, ignored = local.find_local(tmp_path, WORLD)
    assert found is None
    assert ignored == {".": "rank 0 cannot read it: [Errno 5] Input/output error"}


def test_a_save_that_could_not_remove_the_one_before_says_that_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 2, 2.0)

    def dead(folder: Path) -> list[Path]:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(local, "_saves", dead)
        with pytest.raises(SaveError, match="iter_0000004-.* is whole, but removing.*Errno 5"):
            save(tmp_path, 4, 4.0)
    found, _ = local.find_local(tmp_path, WORLD)
    assert found is not None and found.iteration == 4


def test_machines_with_one_name_have_places_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = machine.place(tmp_path)
    assert machine.place(tmp_path / "not" / "made" / "yet").device == here.device
    (tmp_path / "link").symlink_to(tmp_path)
    assert machine.place(tmp_path / "link") == here
    assert machine.place(Path("/proc")).device != here.device
    monkeypatch.setattr(machine, "started", lambda: "another start")
    assert machine.place(tmp_path) != here


def test_of_two_saves_of_one_iteration_the_later_counts(tmp_path: Path) -> None:
    """A run that went back does its iterations again; both saves are whole, a kill came between."""
    older = save(tmp_path / "one", 4, 1.0)
    newer = save(tmp_path / "two", 4, 2.0)
    os.rename(older, tmp_path / "two" / older.name)
    found, _ = local.find_local(tmp_path / "two", WORLD)
    assert found is not None and found.name == newer.name


def test_runs_that_share_a_folder_have_their_own_in_it(tmp_path: Path) -> None:
    one, other = (
        parse(
            f"{BASE} --save {tmp_path}/{home}/save --non-persistent-save-interval 2 "
            f"--non-persistent-global-ckpt-dir {tmp_path}/shared".split()
        ).config.checkpoint
        for home in ("a", "b")
    )
    folders = [config.recovery.shared_folder(str(config.save)) for config in (one, other)]
    assert folders[0] != folders[1]
    assert {folder.parent for folder in folders} == {tmp_path / "shared"}


def test_other_names_are_none_of_ours_and_stay(tmp_path: Path) -> None:
    folder = save(tmp_path, 2, 2.0)
    (folder / "rankfoo.json").touch()
    copy = folder.with_name(folder.name + ".bak")
    shutil.copytree(folder, copy)
    found, ignored = local.find_local(tmp_path, WORLD)
    assert found is not None and found.name == folder.name and not ignored
    save(tmp_path, 4, 4.0)
    assert copy.exists() and not folder.exists()


def test_what_cannot_be_got_leaves_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 2, 2.0)
    found, _ = local.find_local(tmp_path, WORLD)
    assert found is not None
    here = Local(tmp_path, found)

    def fails(self: LocalCheckpoint, wanted: object) -> None:
        self.read("a")
        raise CheckpointError("the machine is gone")

    monkeypatch.setattr(LocalCheckpoint, "fetch", fails)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError, match="is gone"):
        open_source(Source(here.source, False, False), here, Mesh.serial())
    assert len(os.listdir("/proc/self/fd")) == before
