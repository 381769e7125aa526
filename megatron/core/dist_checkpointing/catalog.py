"""The folder that holds a run's checkpoints: which there are, which is to be loaded, which may go.

    SAVE/iter_0000010/                          a checkpoint; `format.open_complete` knows if whole
    SAVE/latest_checkpointed_iteration.txt      the tracker: an iteration, or ``release``
    SAVE/iter_0000020.3f9a1c07.partial/         a save that has not ended (or never will)

Whoever starts takes the newest complete checkpoint. The tracker decides which that is: it moves
after each save, and somebody may set it back by hand. Only a checkpoint published after the tracker
was last written is newer (a save that was stopped between its two steps), and one that is not whole
(its index, or a file's size) or is not of the iteration in its name falls through to the one before
it; checksums are compared later, with the same effect. Everything passed over is named with its
reason. Checkpoints of other programs count as well; they are looked into only when they are to be
loaded (`opened`).
"""

import functools
import os
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal, TypeAlias

from megatron.core.dist_checkpointing.detect import format_of, mark_of, open_index
from megatron.core.dist_checkpointing.format import (
    FORMAT,
    INDEX,
    CheckpointError,
    Index,
    read_index,
)
from megatron.core.dist_checkpointing.publishing import PARTIAL, REPLACED, clear_partials
from megatron.core.utils import atomic_path

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE: Final = "release"
PIN = "keep"
"""A file of this name in a checkpoint's folder protects it from retention."""
DELETED = ".deleted"
"""Ending of a folder that is being removed."""

Name: TypeAlias = int | Literal["release"]


def folder_name(name: Name) -> str:
    """Return the name of a checkpoint's folder."""
    return name if isinstance(name, str) else f"iter_{name:07d}"


def _parse(folder: str) -> Name | None:
    if folder == RELEASE:
        return RELEASE
    iteration = _numbered(folder)
    return iteration if iteration is not None and folder == folder_name(iteration) else None


def _numbered(folder: str) -> int | None:
    digits = folder.removeprefix("iter_")
    if not folder.startswith("iter_") or not (digits.isascii() and digits.isdigit()):
        return None
    return int(digits)


@dataclass(frozen=True)
class Found:
    """A complete checkpoint."""

    name: Name
    folder: Path
    index: Index
    local: bool = False
    """Each machine has a part of it (`local`)."""

    @property
    def published(self) -> float:
        """Return when it was published, in seconds since the epoch."""
        return float(self.index.facts.get("published", 0.0)) if self.is_ours else self.written

    @property
    def written(self) -> float:
        """Return when the file system saw its index last."""
        if self.local:
            return self.published
        return os.stat(mark_of(self.folder, self.index.format)).st_mtime

    @property
    def is_ours(self) -> bool:
        """Return whether this program wrote it."""
        return self.index.format == FORMAT


@dataclass
class Catalog:
    """What a folder of checkpoints holds."""

    root: Path
    tracker: Name | None = None
    complete: list[Found] = field(default_factory=list)
    ignored: dict[Path, str] = field(default_factory=dict)
    """Reason by path."""
    unfinished: list[Path] = field(default_factory=list)
    """Saves that never ended: no checkpoints, and no reason to stop."""

    @property
    def is_empty(self) -> bool:
        """Return whether nothing here claims to be a checkpoint."""
        return not self.complete and not self.ignored


def read_tracker(root: Path) -> Name | None:
    """Return what the tracker names; None when there is no tracker.

    Raises:
        CheckpointError: it holds neither a number nor ``release``.
    """
    path = root / TRACKER
    try:
        text = path.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None
    except IsADirectoryError:
        raise CheckpointError(f"{path} is a folder instead of a file; remove it") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if text == RELEASE:
        return RELEASE
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise CheckpointError(f"{path} holds {text[:40]!r} instead of an iteration or 'release'")
    return int(text)


def write_tracker(root: Path, name: Name) -> None:
    """Make ``name`` the newest checkpoint."""
    with atomic_path(root / TRACKER) as temporary:
        temporary.write_text(str(name), encoding="utf-8")


def scan(root: Path) -> Catalog:
    """Return what ``root`` holds; an absent folder holds nothing.

    Raises:
        CheckpointError: nobody may look into it.
    """
    catalog = Catalog(root)
    try:
        catalog.tracker = read_tracker(root)
    except CheckpointError as error:
        catalog.ignored[root / TRACKER] = str(error)
    try:
        folders = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    except OSError as error:
        raise CheckpointError(f"{root} cannot be read: {error}") from None
    names = {path.name for path in folders}
    for folder in folders:
        # A replaced checkpoint counts while the new one of its name is not there.
        name = folder.name.removesuffix(REPLACED)
        if name != folder.name and name in names:
            continue
        parsed = _parse(name)
        if folder.name.endswith(PARTIAL):
            catalog.unfinished.append(folder)
        elif parsed is not None:
            _examine(catalog, parsed, folder)
        elif (iteration := _numbered(name)) is not None:
            catalog.ignored[folder] = f"its name should be {folder_name(iteration)}"
    named = {_parse(path.name.removesuffix(REPLACED)) for path in folders}
    if catalog.tracker is not None and catalog.tracker not in named:
        path = root / folder_name(catalog.tracker)
        catalog.ignored[path] = f"the tracker {TRACKER} names it, but it does not exist"
    return catalog


def _examine(catalog: Catalog, name: Name, folder: Path) -> None:
    try:
        kind = format_of(folder)
        if kind not in (FORMAT, None):
            catalog.complete.append(Found(name, folder, Index(format=kind)))
            return
        catalog.complete.append(_named_truly(Found(name, folder, open_index(folder))))
    except CheckpointError as error:
        catalog.ignored[folder] = str(error)


def opened(found: Found) -> Found:
    """Return what was found, another program's checkpoint with its whole index.

    Raises:
        CheckpointError: that one is not whole, cannot be read, or is of another iteration than its
            name says.
    """
    if found.is_ours:
        return found
    return _named_truly(replace(found, index=open_index(found.folder)))


def _named_truly(found: Found) -> Found:
    """Return what was found, unless somebody has given it the name of another iteration."""
    iteration = found.index.facts.get("iteration", found.name)
    if found.name not in (RELEASE, iteration):
        raise CheckpointError(
            f"it holds iteration {iteration}, so that it is not what its name says; call it "
            f"{folder_name(iteration)}, or name the folder itself to load it"
        )
    return found


def newest(catalog: Catalog) -> Found | None:
    """Return the checkpoint to load; None when none is complete."""
    by_age = sorted(catalog.complete, key=lambda found: (found.published, str(found.name)))
    tracked = next((found for found in by_age if found.name == catalog.tracker), None)
    if tracked is None:
        return by_age[-1] if by_age else None
    later = [found for found in by_age if is_later(catalog, tracked, found)]
    return later[-1] if later else tracked


def is_later(catalog: Catalog, chosen: Found, other: Found) -> bool:
    """Return whether ``other`` was published after ``chosen``.

    Where the tracker names ``chosen``, it may have been set back by hand, which is obeyed:
    ``other`` must then be later than that, too.
    """
    moved = 0.0
    if catalog.tracker == chosen.name:
        moved = os.stat(catalog.root / TRACKER).st_mtime
    return other.published > chosen.published and other.written > moved


def remove(folder: Path) -> None:
    """Remove a folder as far as possible; of a link to one, the link."""
    if folder.is_symlink():
        folder.unlink(missing_ok=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)


def clear(root: Path) -> list[Path]:
    """Remove what stopped saves and removals left behind; no save of this process is under way.

    Returns what it left alone, since another writer may still fill it.
    """
    for leftover in root.glob(f"*{DELETED}"):
        remove(leftover)
    for leftover in root.glob(f"*{REPLACED}"):
        if (root / leftover.name.removesuffix(REPLACED)).exists():
            shutil.rmtree(leftover, ignore_errors=True)
    for leftover in root.glob(f".{TRACKER}.*"):
        leftover.unlink(missing_ok=True)
    return clear_partials(root)


def prune(root: Path, keep_last: int, retain_interval: int | None) -> list[Path]:
    """Remove older complete checkpoints and return their folders; rank 0 alone calls this.

    Kept are the newest ``keep_last`` up to the one that the tracker names, multiples of
    ``retain_interval``, folders with a file called ``keep``, and all that is not complete, not in
    our format, or beyond the tracker. A folder is renamed before it is removed, so a stop in
    between leaves no checkpoint that looks whole. Each index is read once by a process, however
    often this is called.
    """
    limit = read_tracker(root)
    if not isinstance(limit, int):
        return []
    older = {
        name: folder
        for folder in root.iterdir()
        if isinstance(name := _parse(folder.name), int) and name <= limit and _is_whole(folder)
    }
    removed = []
    for iteration in sorted(older)[:-keep_last]:
        folder = older[iteration]
        retained = retain_interval is not None and iteration % retain_interval == 0
        if retained or (folder / PIN).exists():
            continue
        doomed = folder.with_name(folder.name + DELETED)
        os.rename(folder, doomed)
        remove(doomed)
        removed.append(folder)
    return removed


def _is_whole(folder: Path) -> bool:
    """Return whether a folder is a complete checkpoint of ours, of the iteration in its name."""
    try:
        status = os.stat(folder / INDEX)
    except FileNotFoundError:
        return False
    sizes = _sizes(folder, status.st_ino, status.st_size, status.st_mtime_ns)
    return sizes is not None and all(
        (folder / name).exists() and os.stat(folder / name).st_size == size for name, size in sizes
    )


@functools.lru_cache(maxsize=1024)
def _sizes(folder: Path, *stamp: int) -> tuple[tuple[str, int], ...] | None:
    """Return the files that an index names; None if it is not whole. ``stamp``: of the index."""
    try:
        index = read_index(folder)
        _named_truly(Found(_parse(folder.name) or 0, folder, index))
    except CheckpointError:
        return None
    return tuple(index.files.items())
