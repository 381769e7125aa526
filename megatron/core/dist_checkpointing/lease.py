"""One run at a time saves to a folder: a record says which, and is touched as long as it lives.

    SAVE/writer.json            who (`writer`); its time of change is the last sign of life

Two runs in one folder would not mix their files, as each writes beside the other
(`publishing`), but they would move one tracker, remove each other's checkpoints, and replace those
of one iteration. So whoever starts looks for a record. If its process runs on this machine, or on
another one and goes on touching the file, the newcomer is refused, with the name of the other; one
that is dead, or quiet for `STALE` seconds, is followed at once, and so is one of the same job,
which the launcher has started anew. A file that is young, but whose machine cannot be asked, is
watched for so long.

Nothing here rests on locks of the file system, which shared ones often lack: the record is made
exclusively, and whoever finds before a save that it is no longer its own does not save any more.
"""

import errno
import os
import secrets
import stat
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from megatron.core.dist_checkpointing import writer
from megatron.core.dist_checkpointing.part import write_all
from megatron.core.dist_checkpointing.writer import RECORD, Writer
from megatron.core.utils import Say, UserError, make_folder, silent, sync_folder

BEAT = 5.0
"""Seconds between two signs of life."""
STALE = 30.0
"""Seconds without one after which a writer on another machine is taken to be dead."""


class LostError(OSError):
    """Another run has taken the folder over."""


class Lease:
    """The right of this process to save to ``folder``, from its making to `release`.

    Args:
        folder: of checkpoints; it is made if absent.
        flag: what named it.
        say: told what is found of other runs.

    Raises:
        UserError: another run that lives saves there.
        OSError: the file system failed.
    """

    def __init__(self, folder: Path, flag: str = "--save", say: Say = silent) -> None:
        self._path, self._flag, self._say = folder / RECORD, flag, say
        make_folder(folder)
        self._mine = writer.this_process()
        self._file = self._take()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._thread.start()

    def _take(self) -> int:
        """Return the open record, once it is this process's."""
        while (file := self._made()) is None:
            seen = _read(self._path)
            if seen is None:
                continue  # it has just been removed
            is_over = self._is_over(seen)
            if is_over is False:
                raise UserError(self._refusal(seen.writer))
            if is_over:
                if seen.writer is not None and not seen.writer.is_this_process:
                    self._say(f"{self._path.parent}: {seen.writer}, saved here and has ended")
                self._set_aside(seen)
        return file

    def _made(self) -> int | None:
        """Return a new record, or None if there is one."""
        try:
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            return None
        try:
            write_all(file, memoryview(self._mine.text.encode()))
            os.fsync(file)
            sync_folder(self._path.parent)
        except OSError:  # a full disk, say: what is not whole would be nobody's for ever
            os.close(file)
            self._path.unlink(missing_ok=True)
            raise
        return file

    def _is_over(self, seen: "_Seen") -> bool | None:
        """Return whether the writer of a record is dead; None when there is another record now.

        Where nobody knows, it waits for a sign of life.
        """
        other = seen.writer
        if other is not None:
            if other.is_this_process:  # a run before in the same process
                return True
            if other.runs is not None:
                return not other.runs
        patience, signs = STALE, 1
        if other is not None and other.is_of_this_job:
            # Restarted, as a rule; a process that is just being ended may give one more sign.
            patience, signs = 2 * BEAT, 2
        # A time of change in the future says nothing of how long it has been quiet.
        return self._watch(seen, min(patience, STALE - max(self._age(), 0)), patience, signs)

    def _watch(self, seen: "_Seen", first: float, patience: float, signs: int) -> bool | None:
        """Return whether a record stays quiet: no sign in ``first`` seconds, nor after one.

        False after ``signs`` signs of life; None when there is another record.
        """
        other = seen.writer
        if first > 0:
            self._say(
                f"{self._path}: {other or 'somebody'} may still save there; looking for up to "
                f"{first:.0f} s whether it lives"
            )
        touched, limit = seen.touched, time.monotonic() + first
        while time.monotonic() < limit:
            time.sleep(min(BEAT, 1.0))
            found = _read(self._path)
            if found is None or found.writer != other:
                return None
            if found.touched != touched:
                signs -= 1
                if not signs:
                    return False
                touched, limit = found.touched, time.monotonic() + patience
        return True

    def _age(self) -> float:
        try:
            return writer.now(self._path.parent) - self._path.stat().st_mtime
        except FileNotFoundError:
            return STALE

    def _refusal(self, other: Writer | None) -> str:
        where = self._path.parent
        is_namesake = other is not None and other.is_of_this_job
        name = " Both jobs have one name (--rdzv-id): give each its own." if is_namesake else ""
        return (
            f"{self._flag} ({where}): another run saves there: {other}; its last sign of life is "
            f"{max(self._age(), 0):.0f} s old. Give this run a folder of its own, or end that one "
            f"(its checkpoints stay, and this run can go on from them). If it is surely gone, "
            f"remove {self._path}.{name}"
        )

    def _set_aside(self, seen: "_Seen") -> None:
        """Remove the record of a dead writer, but not one that somebody has just put there."""
        aside = self._path.with_name(f".{RECORD}.{secrets.token_hex(4)}")
        try:
            os.rename(self._path, aside)
        except FileNotFoundError:
            return  # somebody else did
        found = _read(aside)
        if found is not None and found.writer != seen.writer and not self._path.exists():
            os.rename(aside, self._path)
        else:
            aside.unlink(missing_ok=True)

    def _beat(self) -> None:
        is_told = False
        while not self._ended.wait(BEAT):
            try:
                os.utime(self._file)
                is_told = False
            except OSError as error:
                if not is_told:
                    self._say(f"WARNING: {self._path} cannot be touched: {error}")
                is_told = True

    def check(self) -> None:
        """Return if the folder is still this process's.

        Raises:
            LostError: it is another run's; nothing more should be saved there.
            OSError: the file system failed.
        """
        found = _read(self._path)
        if found is not None and found.writer is None and self._age() > STALE:
            self._set_aside(found)  # it was never whole, and nobody is there to finish it
            found = None
        if found is None:  # removed by hand, or with the folder: there is no other
            make_folder(self._path.parent)
            file = self._made()
            if file is not None:
                os.dup2(file, self._file)
                os.close(file)
                return
            found = _read(self._path)
        if found is None or found.writer != self._mine:
            other = found.writer if found is not None else None
            raise LostError(
                f"{self._path.parent} is now saved to by {other or 'another run'}, which took this "
                "run for dead; this one no longer saves there"
            )

    def release(self) -> None:
        """Give the folder free; the record goes if it is still this process's. May be repeated.

        A record that cannot be removed is only worth a word: it names a process that has ended.
        """
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join()
        try:
            found = _read(self._path)
            if found is not None and found.writer == self._mine:
                self._path.unlink(missing_ok=True)
            os.close(self._file)
        except OSError as error:
            self._say(f"WARNING: {self._path} was not removed: {error}")


@dataclass(frozen=True)
class _Seen:
    """A record as it was found."""

    writer: Writer | None
    """None: it is not whole (yet)."""
    touched: int
    """Its last sign of life."""


def _read(path: Path) -> _Seen | None:
    """Return a record; None if there is none.

    Opened each time, since a shared file system answers from memory otherwise.
    """
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise OSError(errno.EINVAL, "a record is a plain file, not this", str(path))
        with open(path, encoding="utf-8", errors="replace") as file:
            status = os.fstat(file.fileno())
            return _Seen(writer.parse(file.read()), status.st_mtime_ns)
    except FileNotFoundError:
        return None
