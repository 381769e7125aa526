"""A save on a file system that is too small for it."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing import catalog, local, save
from megatron.core.dist_checkpointing.reader import Checkpoint
from megatron.core.mesh import Mesh
from tests.unit.checkpoint_files import item

WORLD = Mesh.serial().world
VARIABLE = "MEGATRON_TEST_SMALL_DISK"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Return a folder on a file system of 2 MiB."""
    if VARIABLE in os.environ:
        yield Path(os.environ[VARIABLE])
        return
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)]
    try:
        made = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip(f"there is no `mount`; {VARIABLE} may name an empty folder on a disk of 2 MiB")
    if made.returncode:
        pytest.skip(
            f"no tmpfs may be mounted here ({made.stderr.strip()}); run as root with "
            f"CAP_SYS_ADMIN, or let {VARIABLE} name an empty folder on a disk of 2 MiB"
        )
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("is_foreseen", [True, False])
def test_ckpt_21_what_does_not_fit_leaves_no_trace(
    disk: Path, monkeypatch: pytest.MonkeyPatch, is_foreseen: bool
) -> None:
    save.save([item("a", torch.ones(1000))], disk / "iter_0000001", {}, WORLD)
    catalog.write_tracker(disk, 1)
    if not is_foreseen:  # somebody else takes the space while it is written
        monkeypatch.setattr(save, "lacking_space", lambda folder, size: None)
    with pytest.raises(save.SaveError, match="free" if is_foreseen else "No space left"):
        save.save([item("a", torch.zeros(2**20))], disk / "iter_0000002", {}, WORLD)
    assert sorted(path.name for path in disk.iterdir()) == ["iter_0000001", catalog.TRACKER]
    with Checkpoint(catalog.newest(catalog.scan(disk)).folder) as checkpoint:
        assert checkpoint.damages() == []


def test_ckpt_21_local_disks_too(disk: Path) -> None:
    device = torch.device("cpu")
    local.save_local([item("a", torch.ones(1000))], disk, 1, {}, WORLD, device)
    with pytest.raises(save.SaveError, match="free"):
        local.save_local([item("a", torch.zeros(2**20))], disk, 2, {}, WORLD, device)
    found, ignored = local.find_local(disk, WORLD)
    assert found is not None and found.iteration == 1 and ignored == {}
    assert len(list(disk.iterdir())) == 1
