"""Recovery checkpoints: saved often, replaced by the next one, for the case of a crash."""

import hashlib
import os
from pathlib import Path
from typing import Literal

from megatron.core.config import Config, check_at_least, option
from megatron.core.utils import UserError

SUBFOLDER = "non_persistent"
"""Of a folder of checkpoints, with shared recovery checkpoints unless a flag says otherwise."""


def own_folder(shared: str, home: str) -> Path:
    """Return where in a folder that several runs name the run that saves to ``home`` has its own.

    Each clears what saves left behind, and drops its last one; neither may be another run's.
    """
    path = os.path.realpath(home)
    digest = hashlib.blake2b(path.encode(), digest_size=4).hexdigest()
    return Path(shared) / f"{os.path.basename(path)}-{digest}"


class RecoveryConfig(Config):
    """Short-lived checkpoints between the regular ones: how often, where, how many copies."""

    non_persistent_save_interval: int | None = option(None)
    """Iterations between recovery checkpoints, of which only the newest is kept."""

    non_persistent_ckpt_type: Literal["global", "local", "in_memory"] | None = option(None)
    """Where they are: ``global`` (when absent) in a folder that all machines share, ``local`` on
    each machine what its own ranks hold."""

    non_persistent_global_ckpt_dir: str | None = option(None, metavar="DIR")
    """Shared folder for them; when absent, ``non_persistent`` in --save, and in --load."""

    non_persistent_local_ckpt_dir: str | None = option(None, metavar="DIR")
    """Folder of each machine's own for them, on its disk or in its memory (/dev/shm)."""

    replication: bool = option(False)
    """Keep copies of local ones on other machines, so that one may be lost."""

    replication_jump: int | None = option(None)
    """Distance between the ranks that keep the same data: that of neighbouring machines, the number
    of ranks on each."""

    replication_factor: int = option(2)
    """Ranks that keep the same data, its owner included."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "non_persistent_save_interval", "replication_jump")
        check_at_least(self, 2, "replication_factor")
        if self.non_persistent_ckpt_type == "in_memory":
            raise UserError(
                "--non-persistent-ckpt-type in_memory is not built, nor is it in Megatron-LM; "
                "local with --non-persistent-local-ckpt-dir in /dev/shm keeps them in memory"
            )
        if self.is_local and self.non_persistent_local_ckpt_dir is None:
            raise UserError(
                "--non-persistent-ckpt-type local needs --non-persistent-local-ckpt-dir, a folder "
                "of each machine's own"
            )
        if self.replication and self.replication_jump is None:
            raise UserError(
                "--replication needs --replication-jump: the number of ranks on each machine, "
                "so that copies are on others"
            )

    @property
    def is_local(self) -> bool:
        """Return whether each machine keeps what its own ranks hold."""
        return self.non_persistent_ckpt_type == "local"

    def shared_folder(self, root: str) -> Path:
        """Return where shared ones of a folder of checkpoints are."""
        given = self.non_persistent_global_ckpt_dir
        return own_folder(given, root) if given is not None else Path(root) / SUBFOLDER

    def copies(self) -> tuple[int, int]:
        """Return the distance between ranks that keep the same data, and how many they are."""
        if self.replication and self.replication_jump is not None:
            return self.replication_jump, self.replication_factor
        return 1, 1
