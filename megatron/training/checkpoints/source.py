"""Which checkpoint a run starts from, and what it says of itself.

Absent or empty, ``--load`` means a start from scratch, with one warning; a folder that holds what
claims to be a checkpoint but no complete one is an error, since starting over would be a surprise.
What was passed over is always named.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import catalog
from megatron.core.dist_checkpointing.catalog import Catalog, Found
from megatron.core.dist_checkpointing.detect import format_of, open_index
from megatron.core.dist_checkpointing.format import CheckpointError
from megatron.core.utils import Say, UserError
from megatron.training.config import CheckpointConfig


@dataclass(frozen=True)
class Source:
    """The checkpoint to load."""

    found: Found
    weights_only: bool
    """Take the weights and start at iteration 0."""


def choose(config: CheckpointConfig, say: Say) -> Source | None:
    """Return what to load; None to start from scratch.

    Raises:
        UserError: --ckpt-step is not there, nothing complete is, or nothing at all is with
            --exit-on-missing-checkpoint.
    """
    if config.load is not None:
        found = find(config.load, config.ckpt_step, say)
        if found is not None:
            # A release is weights alone, as Megatron-LM's loading has it too.
            return Source(found, config.finetune or found.name == catalog.RELEASE)
    if config.pretrained_checkpoint is not None:
        found = find(config.pretrained_checkpoint, config.pretrained_step, say)
        if found is None:
            raise UserError(
                f"--pretrained-checkpoint ({config.pretrained_checkpoint}) holds no checkpoint"
            )
        return Source(found, True)
    if config.load is not None:
        if config.exit_on_missing_checkpoint:
            raise UserError(
                f"--load ({config.load}) holds no checkpoint; without "
                "--exit-on-missing-checkpoint the run would start from scratch"
            )
        say(f"WARNING: --load ({config.load}) holds no checkpoint: starting from scratch")
    return None


def find(folder: str, step: int | None, say: Say) -> Found | None:
    """Return the checkpoint of iteration ``step``, or the newest; None when there is nothing.

    Raises:
        UserError: ``step`` is not there, or something is there but nothing complete.
    """
    root = Path(folder)
    if root.exists() and not root.is_dir():
        raise UserError(f"checkpoint folder {folder} is a file")
    if format_of(root) is not None:
        # The folder of one checkpoint instead of the folder that holds it.
        index = open_index(root)
        number = int(index.facts.get("iteration", 0))
        return Found(catalog.RELEASE if root.name == catalog.RELEASE else number, root, index)
    held = catalog.scan(root)
    if step is not None:
        return _of_step(held, step)
    for path in held.unfinished:
        say(f"{path} is a save that never finished; it is ignored")
    chosen = _newest(held)
    if chosen is None:
        if held.is_empty:
            return None
        raise CheckpointError(f"{folder} holds no complete checkpoint:\n  {_reasons(held)}")
    _announce(held, chosen, say)
    return chosen


def _newest(held: Catalog) -> Found | None:
    """Return the newest one that can be opened; those that cannot be are noted."""
    while (chosen := catalog.newest(held)) is not None:
        try:
            return catalog.opened(chosen)
        except CheckpointError as error:
            held.complete.remove(chosen)
            held.ignored[chosen.folder] = str(error)
    return None


def _of_step(held: Catalog, step: int) -> Found:
    for found in held.complete:
        if found.name == step:
            return catalog.opened(found)
    there = ", ".join(str(found.name) for found in held.complete) or "none"
    reasons = f"\n  {_reasons(held)}" if held.ignored else ""
    raise UserError(
        f"--ckpt-step ({step}): {held.root} has no complete checkpoint of that iteration; "
        f"complete ones: {there}{reasons}"
    )


def _announce(held: Catalog, chosen: Found, say: Say) -> None:
    for path, reason in held.ignored.items():
        say(f"WARNING: ignored {path}: {reason}")
    if held.tracker is None or chosen.name == held.tracker:
        for found in held.complete:
            if found.published > chosen.published:
                say(f"WARNING: ignored {found.folder}: {catalog.TRACKER} names {held.tracker}")
        return
    say(f"WARNING: {catalog.TRACKER} names {held.tracker}, but {chosen.name} is taken")


def _reasons(held: Catalog) -> str:
    return "\n  ".join(f"{path}: {reason}" for path, reason in held.ignored.items())


def stored_config(folder: str, step: int | None) -> dict[str, Any] | None:
    """Return the flat config of the run that wrote a checkpoint, for --use-checkpoint-args.

    None when the folder is absent or empty.
    """
    found = find(folder, step, lambda line: None)
    return None if found is None else dict(found.index.facts.get("config", {}))
