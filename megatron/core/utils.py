"""The few helpers that every package may use; nothing here imports torch."""

import errno
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

Say = Callable[[str], None]
"""Prints a line, or not: on rank 0 only, to a log ..."""


def silent(text: str) -> None:
    """Be a `Say` that says nothing."""


class UserError(ValueError):
    """What a user can fix: the entry points print the message alone and exit with code 2.

    The message names the flags, gives their values, and says what to change.
    """


class PeerError(RuntimeError):
    """Another rank has failed, and says so; the cause is there."""


def nearest(word: str, choices: Iterable[str], count: int = 3) -> list[str]:
    """Return the choices spelled most like ``word``, best first."""
    return get_close_matches(word, list(choices), n=count, cutoff=0.6)


def divide(numerator: int, denominator: int) -> int:
    """Return the exact quotient; a remainder is a bug."""
    assert numerator % denominator == 0, f"{numerator} is not divisible by {denominator}"
    return numerator // denominator


def divisors(number: int) -> list[int]:
    """Return every divisor in ascending order; meant for numbers below some 10**12."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def human_count(number: float) -> str:
    """Return ``number`` with a decimal prefix, such as ``1.3B`` for 1.3e9."""
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(number) >= limit:
            return f"{number / limit:.2f}{suffix}"
    return f"{number:g}"


def human_bytes(number: float) -> str:
    """Return ``number`` bytes with a binary prefix, such as ``1.50 GiB``."""
    for power, suffix in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(number) >= 1024**power:
            return f"{number / 1024**power:.2f} {suffix}"
    return f"{number:.0f} B"


def check_folder(flag: str, path: str | os.PathLike[str]) -> None:
    """Refuse a folder to write to that cannot be made or written; leaves nothing behind.

    Raises:
        UserError: a part of the path is a file, or the system refuses a new entry there.
    """
    folder = Path(path).absolute()
    try:
        while not os.path.lexists(folder):
            folder = folder.parent
        # Trying is surer than permissions, which say nothing of /proc or of a read-only mount.
        Path(tempfile.mkdtemp(prefix=".writable.", dir=folder)).rmdir()
    except OSError as error:
        raise UserError(
            f"{flag} {path}: {folder} is no folder to write to: {error.strerror}"
        ) from None


def check_file(flag: str, path: str | os.PathLike[str], *, replaces: bool = True) -> None:
    """Refuse a file to write that is a folder, or whose folder cannot be written.

    Args:
        flag: what named it.
        path: the file.
        replaces: it is replaced by a new file beside it; else it is opened to append.

    Raises:
        UserError: it cannot be written.
    """
    target = Path(path)
    if target.is_dir():
        raise UserError(f"{flag} {path} is a folder; give a file's name")
    if replaces or not target.exists():
        check_folder(flag, target.absolute().parent if os.path.lexists(path) else path)
    elif not os.access(target, os.W_OK):
        raise UserError(f"{flag} {path} is a file that one cannot write to")


def usable_cores() -> int:
    """Return the CPU cores that this process may run on; without Linux's masks, all there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Return once the names in ``folder`` are on disk.

    Raises:
        OSError: they could not be flushed. A file system that has no flush of folders, and says
            that it has none, is taken at its word.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def make_folder(folder: str | os.PathLike[str]) -> None:
    """Make a folder and those above it, if absent; on return their names are on disk.

    Raises:
        OSError: it cannot be made, or a file has its name.
    """
    path = Path(folder).absolute()
    if path.is_dir():
        return
    if path.parent != path:
        make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync_folder(path.parent)


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside ``path`` that replaces it when the block succeeds.

    The file is flushed to disk before the rename and its name after it, so that a crash or a power
    cut leaves the old file or the new one, never a part, and the new one once this has returned.
    When the block raises, the temporary file is removed.
    """
    target = Path(path)
    make_folder(target.parent)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        # mkstemp makes private files; give what an ordinary open would have given.
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        os.replace(temporary, target)
        sync_folder(target.parent)
    finally:
        temporary.unlink(missing_ok=True)
