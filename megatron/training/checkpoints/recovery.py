"""Recovery checkpoints of a run: saved between the regular ones, the last replaced by the next.

Shared ones are ordinary checkpoints in a folder of their own, where one is kept. Local ones are on
the machines' own disks (`dist_checkpointing.local`), in a folder named after --save, so that runs
do not take each other's.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.core import comm
from megatron.core.dist_checkpointing.boxes import whole_box
from megatron.core.dist_checkpointing.catalog import Found
from megatron.core.dist_checkpointing.load import source_of
from megatron.core.dist_checkpointing.local import (
    UNFINISHED,
    LocalFound,
    find_local,
    save_local,
)
from megatron.core.dist_checkpointing.local_copies import Copies
from megatron.core.dist_checkpointing.local_reading import LocalCheckpoint
from megatron.core.dist_checkpointing.machine import Place, place
from megatron.core.dist_checkpointing.plan import Item
from megatron.core.dist_checkpointing.reader import Checkpoint
from megatron.core.dist_checkpointing.save import SaveError, agree, attempt
from megatron.core.mesh import Mesh
from megatron.core.progress import Told, untold
from megatron.core.utils import Say, UserError, human_bytes
from megatron.training.checkpoint_config import CheckpointConfig
from megatron.training.checkpoints import save as saving
from megatron.training.checkpoints.contents import random_key
from megatron.training.checkpoints.run import CheckpointedRun
from megatron.training.checkpoints.save import Saved
from megatron.training.checkpoints.source import Source
from megatron.training.recovery_config import own_folder
from megatron.training.state import TrainState


def save_recovery(run: CheckpointedRun, state: TrainState) -> Saved:
    """Save where recovery checkpoints are, and drop the last one; as `save.save_checkpoint`.

    A collective of the world, at the boundary of an iteration. A failure is reported and returned;
    older checkpoints of any kind are then as they were.
    """
    config = run.config
    assert config.save is not None, "nowhere to save to"
    if config.recovery.is_local:
        return _save_local(run, state)
    there = str(config.recovery.shared_folder(config.save))
    alone = replace(config, save=there, save_keep_last=1, save_retain_interval=None)
    return saving.save_checkpoint(replace(run, config=alone), state)


def _save_local(run: CheckpointedRun, state: TrainState) -> Saved:
    """Save to the machines' own disks; the rest as `save_recovery`."""
    begin = time.monotonic()
    config, mesh = run.config, run.mesh
    assert config.save is not None
    run.say(f"saving local checkpoint at iteration {state.iteration:7d}")
    # One name on all machines, however each calls the folder of checkpoints.
    root = local_root(config, comm.broadcast_object(config.save, mesh.world))
    try:
        everything, stored = saving.gathered(run, state)
        folder, size = save_local(
            everything,
            root,
            state.iteration,
            stored,
            mesh.world,
            mesh.device,
            Copies(*config.recovery.copies()),
            run.check_lease,
        )
    except SaveError as error:
        run.say(f"WARNING: saving iteration {state.iteration} to local disks failed: {error}")
        return Saved(None, str(error), time.monotonic() - begin)
    seconds = time.monotonic() - begin
    run.say(
        f"  successfully saved local checkpoint from iteration {state.iteration:7d} to {folder} "
        f"({human_bytes(size)} in {seconds:.1f} s)"
    )
    return Saved(folder, None, seconds, size)


def local_root(config: CheckpointConfig, home: str) -> Path:
    """Return this machine's folder for the local checkpoints of the run that saves to ``home``."""
    given = config.recovery.non_persistent_local_ckpt_dir
    assert given is not None, "--non-persistent-ckpt-type local has a folder"
    return own_folder(given, home)


def check_places(config: CheckpointConfig, mesh: Mesh) -> None:
    """Refuse copies that would be where the original is; a collective of the world.

    Raises:
        UserError: two ranks that keep the same data write into one folder; by every rank.
    """
    recovery = config.recovery
    if not (config.save and recovery.is_local and recovery.replication):
        return
    copies = Copies(*recovery.copies())
    folder, here = Path(str(recovery.non_persistent_local_ckpt_dir)), list[Place]()
    problem = attempt(lambda: here.append(place(folder)), True)
    if problem is not None:
        problem = f"--non-persistent-local-ckpt-dir ({folder}): {problem}"
    agree(problem, mesh.world, UserError)
    places = comm.gather_objects(here[0], mesh.world)
    # Another folder on the same machine is no other machine, but may be another disk.
    alone = len({where.machine for where in places}) == 1
    way_out = (
        "all ranks are on it, and on one machine no copy would survive it: leave out --replication"
        if alone
        else "give the number of ranks on each machine"
    )
    for rank, where in enumerate(places):
        for partner in copies.partners(rank):
            if partner != rank and places[partner] == where:
                raise UserError(
                    f"--replication-jump ({copies.jump}): ranks {rank} and {partner} would keep "
                    f"copies of each other's data, but both write into {where.path} on one "
                    f"machine; {way_out}"
                )


@dataclass(frozen=True)
class Local:
    """The newest complete local checkpoint."""

    root: Path
    found: LocalFound

    @property
    def source(self) -> Found:
        """Return it as one among the others."""
        folder = self.root / self.found.name
        return Found(self.found.iteration, folder, self.found.index, local=True)


def newest_local(
    config: CheckpointConfig, mesh: Mesh, say: Say
) -> tuple[Local | None, dict[Path, str]]:
    """Return the newest complete one of --load (or that of --ckpt-step), and what others lack.

    A collective of the world. None when no folder was given, or none holds any.
    """
    if config.load is None or config.recovery.non_persistent_local_ckpt_dir is None:
        return None, {}
    root = local_root(config, comm.broadcast_object(config.load, mesh.world))
    found, ignored = find_local(root, mesh.world, config.ckpt_step)
    incomplete = {}
    for name, reason in ignored.items():
        if reason == UNFINISHED:
            say(f"{root / name} is a local save that never finished; it is ignored")
        else:
            incomplete[root / name] = reason
    return (Local(root, found) if found is not None else None), incomplete


def open_source(
    source: Source, local: Local | None, mesh: Mesh, wanted: Sequence[Item] = ()
) -> Checkpoint:
    """Open what is to be loaded; of a local one, get what this machine lacks of ``wanted``.

    A collective of the world. The random states of this rank are got too.
    """
    if local is None or not source.found.local:
        return Checkpoint(source.found.folder, source.found.index)
    checkpoint = LocalCheckpoint(local.root, local.found, mesh.world, mesh.device)
    tensors = checkpoint.tensors
    boxes = [
        (key, piece.box)
        for item in wanted
        for piece in item.pieces
        if (key := source_of(item, tensors)) is not None
    ]
    if wanted and random_key(mesh) in tensors:
        states = tensors[random_key(mesh)]
        boxes.append((random_key(mesh), whole_box(states.shape)))
    try:
        checkpoint.fetch(boxes)
    except BaseException:
        checkpoint.close()
        raise
    return checkpoint


def compared(checkpoint: LocalCheckpoint, local: Local, say: Say, told: Told = untold) -> Local:
    """Return ``local`` without copies whose checksums are wrong; a collective of the world.

    Raises:
        DamagedError: some file has no sound copy; every rank raises.
    """
    found, problems = checkpoint.compare(told)
    for problem in problems:
        say(f"WARNING: {checkpoint.folder}: {problem}; another copy is read instead")
    return replace(local, found=found)
