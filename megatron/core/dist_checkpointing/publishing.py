"""Putting a folder in place, whole or not at all.

Whoever writes a checkpoint, or an export of one, writes beside its place and renames at the end:

    iter_0000010.3f9a1c07.partial/      what one writer fills; the number is drawn for it alone

so that two writers of one checkpoint never share a file, whatever else goes wrong. An older folder
of the same name goes aside for the moment between two renames; `catalog` knows it, and takes it
for the checkpoint as long as nothing else has its name.
"""

import errno
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.core.dist_checkpointing import writer
from megatron.core.utils import make_folder, sync_folder

PARTIAL = ".partial"
"""Ending of the folder that a save writes into; one that stays behind is no checkpoint."""
REPLACED = ".replaced"
"""Ending of an older folder of the same name, for the moment between two renames."""
PATIENCE = 600.0
"""Seconds without a change after which a writer that cannot be asked is taken to be dead."""
TRIES = 20
"""How often an older folder is moved aside while others put theirs in its place."""


class InPlaceError(OSError):
    """A folder is in its place, whole, but something after that failed."""


def draw_token() -> str:
    """Return a number that no other writer has."""
    return secrets.token_hex(4)


def partial_of(final: Path, token: str) -> Path:
    """Return the folder that the writer with ``token`` fills, to become ``final``."""
    return final.with_name(f"{final.name}.{token}{PARTIAL}")


def make_partial(partial: Path) -> None:
    """Make a folder to fill, with the name of its writer in it.

    Raises:
        OSError: it cannot be made, or is there already.
    """
    make_folder(partial.parent)
    os.mkdir(partial)
    writer.sign(partial)


def clear_partials(root: Path, pattern: str = "*") -> list[Path]:
    """Remove what stopped writers have left in ``root``; return what somebody may still fill."""
    kept = []
    for leftover in sorted(root.glob(f"{pattern}{PARTIAL}")):
        if not writer.may_live(leftover, PATIENCE):
            shutil.rmtree(leftover, ignore_errors=True)
        elif leftover.exists():  # its writer may have put it in place meanwhile
            kept.append(leftover)
    return kept


@contextmanager
def building(final: Path) -> Iterator[Path]:
    """Yield a folder to fill and `put_in_place`; it is removed when the block raises.

    What stopped writers of the same ``final`` have left goes first.
    """
    if final.parent.is_dir():
        clear_partials(final.parent, f"{glob.escape(final.name)}.*")
    partial = partial_of(final, draw_token())
    make_partial(partial)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def put_in_place(partial: Path, final: Path) -> None:
    """Rename ``partial``, whose files are on disk, to ``final``, in the place of an older one.

    The name of its writer goes after that: a folder without it is nobody's to others, who may
    remove it. One that stays behind in ``final``, after a kill, does no harm.

    Raises:
        InPlaceError: ``final`` is there, but may not survive a power cut.
        OSError: a rename failed; the older one is then where it was, unless another writer has
            just put its own there.
    """
    sync_folder(partial)
    old = final.with_name(final.name + REPLACED)
    _replace(partial, final, old)
    try:
        (final / writer.RECORD).unlink(missing_ok=True)
        sync_folder(final.parent)
    except OSError as error:
        raise InPlaceError(
            f"{final} is in place and whole, but its name could not be flushed to disk, so that it "
            f"may not survive a power cut: {error}"
        ) from error
    shutil.rmtree(old, ignore_errors=True)


def _replace(partial: Path, final: Path, old: Path) -> None:
    """Rename ``partial`` to ``final``; what has that name goes to ``old``, also time and again."""
    for further in reversed(range(TRIES)):
        try:
            if final.exists():
                shutil.rmtree(old, ignore_errors=True)
                os.rename(final, old)
            os.rename(partial, final)
            return
        except OSError as error:
            # Another writer has put its folder there, or moved one aside, at the same moment.
            crossed = error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT)
            if crossed and further and partial.exists():
                continue
            if old.exists() and not final.exists():
                os.rename(old, final)
            raise
