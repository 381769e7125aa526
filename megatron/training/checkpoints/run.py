"""A run as its checkpoints see it."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from megatron.core.dist_checkpointing.lease import Lease
from megatron.core.mesh import Mesh
from megatron.core.utils import Say
from megatron.training.checkpoint_config import CheckpointConfig
from megatron.training.checkpoints.contents import Optimizer
from megatron.training.checkpoints.facts import RunFacts


@dataclass(frozen=True)
class CheckpointedRun:
    """What saving and loading need to know of a run, but how far it is."""

    config: CheckpointConfig
    """Where to save to and to load from, and how."""
    mesh: Mesh
    """This rank's place."""
    models: Sequence[nn.Module]
    """This rank's chunks of the model."""
    optimizer: Optimizer | None
    """None: weights alone are saved and loaded."""
    facts: RunFacts
    """What the run says of itself."""
    say: Say
    """Takes lines for the log."""
    lease: Lease | None = None
    """Rank 0's right to save there; nothing is saved when it is lost."""

    def check_lease(self) -> None:
        """Do nothing while this run may save, for all that this rank knows.

        Raises:
            LostError: this is rank 0, and its lease is lost.
            OSError: the file system failed.
        """
        if self.lease is not None:
            self.lease.check()
