"""Putting a folder in place, whole or not at all.

Whoever writes a checkpoint, or an export of one, writes beside its place and renames at the end. An
older folder of the same name goes aside for the moment between two renames; `catalog` knows it, and
takes it for the checkpoint as long as nothing else has its name.
"""

import os
import shutil
from pathlib import Path

from megatron.core.dist_checkpointing.format import sync_folder

PARTIAL = ".partial"
"""Ending of the folder that a save writes into; one that stays behind is no checkpoint."""
REPLACED = ".replaced"
"""Ending of an older folder of the same name, for the moment between two renames."""


def put_in_place(partial: Path, final: Path) -> None:
    """Rename ``partial``, whose files are on disk, to ``final``, in the place of an older one.

    Raises:
        OSError: a rename failed; the older one is then where it was.
    """
    sync_folder(partial)
    old = final.with_name(final.name + REPLACED)
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(final, old)
    try:
        os.rename(partial, final)
    except OSError:
        if old.exists():
            os.rename(old, final)
        raise
    sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)
