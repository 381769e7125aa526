"""--ckpt-convert-format: the checkpoint of --load in a format of Megatron-LM's; then the end."""

import os
from collections.abc import Callable
from pathlib import Path

from megatron.core import comm
from megatron.core.dist_checkpointing import catalog
from megatron.core.dist_checkpointing.format import CheckpointError
from megatron.core.dist_checkpointing.megatron_formats.export import (
    check_exported_kind,
    export_torch_dist,
    left_out,
)
from megatron.core.dist_checkpointing.reader import Checkpoint, DamagedError
from megatron.core.mesh import Mesh
from megatron.core.progress import Bar
from megatron.core.utils import Say, UserError, human_bytes
from megatron.training.checkpoint_config import CheckpointConfig
from megatron.training.checkpoints.source import find
from megatron.training.processes.rank_zero import from_first_at_length


def convert(config: CheckpointConfig, mesh: Mesh, say: Say) -> None:
    """Write ``DIR/torch_dist/iter_N`` and move the tracker there; a collective of the world.

    Tensors go through the first rank piece by piece, and no model is built.

    Raises:
        UserError: there is nothing to convert, it is damaged, or it would overwrite what it reads.
    """
    from_first_at_length(mesh.world, lambda goes_on: _convert(config, say, goes_on))
    comm.barrier(mesh.world)


def _convert(config: CheckpointConfig, say: Say, goes_on: Callable[[], None]) -> None:
    assert config.load is not None and config.ckpt_convert_save is not None
    assert config.ckpt_convert_format is not None
    found = find(config.load, config.ckpt_step, say)
    if found is None:
        raise UserError(f"--load ({config.load}) holds no checkpoint to convert")
    root = Path(config.ckpt_convert_save) / config.ckpt_convert_format
    target = root / catalog.folder_name(found.name)
    flags = f"--ckpt-convert-format {config.ckpt_convert_format}"
    check_exported_kind(found.index.facts, found.folder, flags)
    if target.exists() and os.path.samefile(target, found.folder):
        raise UserError(f"--ckpt-convert-save would replace {target}, which is to be converted")
    with Checkpoint(found.folder, found.index) as checkpoint:
        stored = sum(checkpoint.files.values())
        if config.verify_integrity:
            with Bar(stored, "checked", goes_on) as bar:
                damages = checkpoint.damages(told=bar)
            if damages:
                raise DamagedError(f"{found.folder} is damaged:\n  " + "\n  ".join(damages))
        if without := left_out(checkpoint):
            say(f"{config.ckpt_convert_format} has no place for {without}")
        try:
            with Bar(stored, "wrote", goes_on) as bar:
                export_torch_dist(checkpoint, target, bar)
        except OSError as error:
            raise CheckpointError(f"{target} could not be written: {error}") from None
    catalog.write_tracker(root, found.name)
    size = human_bytes(bar.done)
    say(f"converted {found.folder} to {target} ({config.ckpt_convert_format}, {size})")
