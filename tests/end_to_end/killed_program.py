"""pretrain_gpt.py that kills itself, as SIGKILL does, at one place of a save.

Its first words are the rank, the place and the iteration from which on it counts:

    written     a rank has written some of its bytes
    marked      a rank has left its done-mark, nothing is published
    published   the new checkpoint is there, the tracker names the one before
    removing    retention has renamed an older one and removed a part of it
    nowhere     never
"""

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import pretrain_gpt
from megatron.core.dist_checkpointing import catalog, save

PLACES = ("written", "marked", "published", "removing")


def die() -> None:
    """End this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def main(words: list[str] | None = None) -> int:
    """Run the program and return its exit code, if it gets that far."""
    rank, place, first, *rest = sys.argv[1:] if words is None else words
    if os.environ.get("RANK", "0") != rank:
        return pretrain_gpt.main(rest)
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, place, int(first))
        return pretrain_gpt.main(rest)


def plant(patch: pytest.MonkeyPatch, place: str, first: int) -> None:
    """Put the end of this process where ``place`` says, from iteration ``first`` on."""
    write_all, write_index = save._write_all, save.write_index
    publish, rmtree = save.publish, shutil.rmtree
    written = 0

    def writes(descriptor: int, data: memoryview) -> None:
        nonlocal written
        write_all(descriptor, data)
        written += 1
        folder = Path(os.readlink(f"/proc/self/fd/{descriptor}")).parent
        if written > 3 and number(folder) >= first:
            die()

    def marks(index: Any, path: Path) -> None:
        write_index(index, path)
        if path.name.endswith(".done") and number(path.parent) >= first:
            die()

    def publishes(partial: Path, final: Path, *rest: Any) -> Any:
        index = publish(partial, final, *rest)
        if number(final) >= first:
            die()
        return index

    def removes(path: Any, **rest: Any) -> None:
        if str(path).endswith(catalog.DELETED) and number(Path(path)) + 2 >= first:
            next(Path(path).iterdir()).unlink()
            die()
        rmtree(path, **rest)

    targets: dict[str, tuple[Any, str, Any]] = {
        "written": (save, "_write_all", writes),
        "marked": (save, "write_index", marks),
        "published": (save, "publish", publishes),
        "removing": (shutil, "rmtree", removes),
    }
    if place in targets:
        patch.setattr(*targets[place])


def number(folder: Path) -> int:
    """Return the iteration in a folder's name."""
    return int(folder.name.removeprefix("iter_").partition(".")[0])
