"""Which checkpoint a run starts from, and what it says of itself.

Absent or empty, ``--load`` means a start from scratch, with one warning; a folder that holds what
claims to be a checkpoint but no complete one is an error, since starting over would be a surprise.
What was passed over is always named.

What turns out not to match its checksums is passed over like the rest: `choose` is asked again,
without it. One that a flag names (--ckpt-step, the folder of one checkpoint) has no substitute.

A run may save in several places: recovery checkpoints are in a folder beside the regular ones, in
another one, or on the machines' own disks (`local`). The newest complete one of all is taken.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron.core.dist_checkpointing import catalog
from megatron.core.dist_checkpointing.catalog import Catalog, Found
from megatron.core.dist_checkpointing.detect import format_of, open_index
from megatron.core.dist_checkpointing.format import CheckpointError
from megatron.core.utils import Say, UserError
from megatron.training.checkpoint_config import CheckpointConfig
from megatron.training.recovery_config import SUBFOLDER, own_folder

NOTHING: Mapping[Path, str] = MappingProxyType({})


@dataclass(frozen=True)
class Source:
    """The checkpoint to load."""

    found: Found
    weights_only: bool
    """Take the weights and start at iteration 0."""
    is_named: bool
    """A flag names this one, so that no other will do."""


def choose(
    config: CheckpointConfig,
    say: Say,
    local: Found | None = None,
    damaged: Mapping[Path, str] = NOTHING,
    incomplete: Mapping[Path, str] = NOTHING,
) -> Source | None:
    """Return what to load; None to start from scratch.

    Args:
        config: of checkpoints.
        say: prints a line.
        local: the newest complete one on the machines' own disks.
        damaged: folders to pass over, with the reason.
        incomplete: what the machines' own disks hold besides, with what it lacks.

    Raises:
        UserError: --ckpt-step is not there, nothing complete is, or nothing at all is with
            --exit-on-missing-checkpoint.
    """
    if config.load is not None:
        apart = config.recovery.non_persistent_global_ckpt_dir
        found = find(
            config.load,
            config.ckpt_step,
            say,
            apart=apart,
            local=local,
            damaged=damaged,
            incomplete=incomplete,
        )
        if found is not None:
            # A release is weights alone, as Megatron-LM's loading has it too.
            is_fresh = config.finetune or found.name == catalog.RELEASE
            is_named = config.ckpt_step is not None or found.folder == Path(config.load)
            return Source(found, is_fresh, is_named)
    if config.pretrained_checkpoint is not None:
        found = find(
            config.pretrained_checkpoint,
            config.pretrained_step,
            say,
            flag="--pretrained-checkpoint",
        )
        if found is None:
            raise UserError(
                f"--pretrained-checkpoint ({config.pretrained_checkpoint}) holds no checkpoint"
            )
        return Source(found, True, True)
    if config.load is not None:
        if config.exit_on_missing_checkpoint:
            raise UserError(
                f"--load ({config.load}) holds no checkpoint; without "
                "--exit-on-missing-checkpoint the run would start from scratch"
            )
        if config.override_ckpt_iteration is not None:
            raise UserError(
                f"--override-ckpt-iteration ({config.override_ckpt_iteration}) counts a "
                f"checkpoint's iteration anew, and --load ({config.load}) holds none; drop it"
            )
        say(f"WARNING: --load ({config.load}) holds no checkpoint: starting from scratch")
    return None


def find(
    folder: str,
    step: int | None,
    say: Say,
    *,
    apart: str | None = None,
    local: Found | None = None,
    damaged: Mapping[Path, str] = NOTHING,
    incomplete: Mapping[Path, str] = NOTHING,
    flag: str = "--load",
) -> Found | None:
    """Return the checkpoint of iteration ``step``, or the newest; None when there is nothing.

    Args:
        folder: of checkpoints, or one of them.
        step: an iteration.
        say: prints a line.
        apart: another folder of recovery checkpoints than the one inside of ``folder``.
        local: a recovery checkpoint on the machines' own disks.
        damaged: folders to pass over where ``step`` names none, with the reason.
        incomplete: what the machines' own disks hold besides, with what it lacks.
        flag: what named ``folder``.

    Raises:
        UserError: ``step`` is not there, or something is there but nothing complete.
    """
    root = Path(folder)
    if root.exists() and not root.is_dir():
        raise UserError(f"{flag} ({folder}) is a file; give a folder of checkpoints")
    if format_of(root) is not None:
        return _the_one(root, step)
    held = catalog.scan(root)
    held.ignored.update(incomplete)
    others = [*_recovery(held, apart), *([local] if local is not None else [])]
    if step is not None:
        return _of_step(held, others, step)
    for path in held.unfinished:
        say(f"{path} is a save that never finished; it is ignored")
    _pass_over(held, others, damaged)
    chosen = _newest(held)
    recovery = max(others, key=lambda found: found.published, default=None)
    if recovery is not None and (chosen is None or catalog.is_later(held, chosen, recovery)):
        for path, reason in held.ignored.items():
            say(f"WARNING: ignored {path}: {reason}")
        newest = f"{chosen.folder}" if chosen is not None else f"any checkpoint of {root}"
        say(f"recovery checkpoint {recovery.folder} is newer than {newest}: it is taken")
        return recovery if recovery.local else catalog.opened(recovery)
    if chosen is None:
        if held.is_empty:
            return None
        raise CheckpointError(f"{folder} holds no complete checkpoint:\n  {_reasons(held)}")
    _announce(held, chosen, say)
    return chosen


def _the_one(folder: Path, step: int | None) -> Found:
    """Return the checkpoint that ``folder`` is, instead of holding some, whatever its name."""
    index = open_index(folder)
    number = int(index.facts.get("iteration", 0))
    if step not in (None, number):
        raise UserError(
            f"--ckpt-step ({step}), but {folder} is one checkpoint, of iteration {number}; "
            "name the folder that holds it, or leave --ckpt-step out"
        )
    return Found(catalog.RELEASE if folder.name == catalog.RELEASE else number, folder, index)


def _newest(held: Catalog) -> Found | None:
    """Return the newest one that can be opened; those that cannot be are noted."""
    while (chosen := catalog.newest(held)) is not None:
        try:
            return catalog.opened(chosen)
        except CheckpointError as error:
            held.complete.remove(chosen)
            held.ignored[chosen.folder] = str(error)
    return None


def _pass_over(held: Catalog, others: list[Found], damaged: Mapping[Path, str]) -> None:
    """Take what is damaged out of both lists; it is named like all that is ignored."""
    for complete in (held.complete, others):
        for found in [one for one in complete if one.folder in damaged]:
            complete.remove(found)
            held.ignored[found.folder] = damaged[found.folder]


def _recovery(held: Catalog, apart: str | None) -> list[Found]:
    """Return the complete recovery checkpoints of a run; what else is there goes to ``held``."""
    found: list[Found] = []
    own = [own_folder(apart, str(held.root))] if apart is not None else []
    for place in (held.root / SUBFOLDER, *own):
        there = catalog.scan(place)
        held.unfinished += there.unfinished
        held.ignored.update(there.ignored)
        found += there.complete
    return found


def _of_step(held: Catalog, others: Sequence[Found], step: int) -> Found:
    for found in (*held.complete, *others):
        if found.name == step:
            return found if found.local else catalog.opened(found)
    there = ", ".join(str(found.name) for found in (*held.complete, *others))
    reasons = f"\n  {_reasons(held)}" if held.ignored else ""
    raise UserError(
        f"--ckpt-step ({step}): {held.root} has no complete checkpoint of that iteration; "
        f"complete ones: {there or 'none'}"
        + "; without --ckpt-step the newest of them is taken" * bool(there)
        + reasons
    )


def ways_out(config: CheckpointConfig, damaged: Found) -> str:
    """Return what a user can do where the checkpoint that a flag names is damaged."""
    # A recovery checkpoint of that iteration is not in the folder that holds the others.
    is_step = config.ckpt_step is not None and config.load is not None
    root = Path(str(config.load)) if is_step else damaged.folder.parent
    others = [
        str(found.name) for found in catalog.scan(root).complete if found.folder != damaged.folder
    ]
    if not others:
        return f"No other checkpoint in {root} is complete."
    way = f"Complete ones in {root} besides: {', '.join(others)}. --ckpt-step takes one, "
    if is_step:
        return f"{way}and without it the run starts from the newest that is sound."
    return f"{way}with {root} as the folder."


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


def stored_config(
    folder: str, step: int | None, *, apart: str | None = None
) -> dict[str, Any] | None:
    """Return the flat config of the run that wrote a checkpoint, for --use-checkpoint-args.

    Args:
        folder: of checkpoints, or one of them; None is returned when it is absent or empty.
        step: an iteration; the newest when None.
        apart: another folder of recovery checkpoints than the one inside of ``folder``.
    """
    found = find(folder, step, lambda line: None, apart=apart)
    return None if found is None else dict(found.index.facts.get("config", {}))
