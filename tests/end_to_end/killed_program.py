"""pretrain_gpt.py that kills itself, as SIGKILL does, at one place of a save.

Its first words are the rank, the place and the iteration from which on it counts:

    written     a rank has written some of its bytes
    marked      a rank has left its done-mark, nothing is published
    published   the new checkpoint is there, the tracker names the one before
    removing    retention has renamed an older one and removed a part of it
    copied      a rank has made its copies beside training, and written nothing
    exchanged   a rank has given its part of a local checkpoint to others
    named       a rank has said that its part of a local checkpoint is there
    older       a rank has removed a part of an older local checkpoint
    training    a forward pass, of this iteration
    nowhere     never

Or, at ``full``, it lives on: the disk takes files of `SMALL` bytes at most, in this iteration only.
``{rank}`` in a word is the rank's number.
"""

import os
import re
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pretrain_gpt
from megatron.core.dist_checkpointing import background, catalog, local, part, save

PLACES = ("written", "marked", "published", "removing")
COPIED = "copied"
LOCAL_PLACES = ("written", "marked", "named", "older", "exchanged")
SMALL = 1 << 16
"""Less than a checkpoint, more than all that these runs print."""


def die() -> None:
    """End this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def main(words: list[str] | None = None) -> int:
    """Run the program and return its exit code, if it gets that far."""
    rank, place, first, *rest = sys.argv[1:] if words is None else words
    rest = [word.replace("{rank}", os.environ.get("RANK", "0")) for word in rest]
    if os.environ.get("RANK", "0") != rank:
        return pretrain_gpt.main(rest)
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, place, int(first))
        return pretrain_gpt.main(rest)


def plant(patch: pytest.MonkeyPatch, place: str, first: int) -> None:
    """Put the end of this process where ``place`` says, from iteration ``first`` on."""
    targets: dict[str, tuple[Any, str, Callable[[Any, int], Any]]] = {
        "training": (pretrain_gpt, "forward_step", _training),
        "full": (pretrain_gpt, "forward_step", _full),
        "written": (part.Part, "_put_chunk", _written),
        "marked": (part, "write_index", _marked),
        "published": (save, "publish", _published),
        "removing": (shutil, "rmtree", _removing),
        "copied": (background.BackgroundSave, "_copy", _copied),
        "exchanged": (local, "exchange", _after_folder),
        "named": (local, "write_index", _named),
        "older": (shutil, "rmtree", _older),
    }
    if place in targets:
        module, name, planted = targets[place]
        patch.setattr(module, name, planted(getattr(module, name), first))


def _training(forward_step: Any, first: int) -> Any:
    def planted(model: Any, batch: Any, x: Any, dropout: Any) -> Any:
        if dropout is not None and dropout.iteration == first:
            die()
        return forward_step(model, batch, x, dropout)

    return planted


def _full(forward_step: Any, first: int) -> Any:
    most = resource.getrlimit(resource.RLIMIT_FSIZE)

    def planted(model: Any, batch: Any, x: Any, dropout: Any) -> Any:
        if dropout is not None:
            is_full = dropout.iteration == first
            resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL, most[1]) if is_full else most)
        return forward_step(model, batch, x, dropout)

    return planted


def _written(put_chunk: Any, first: int) -> Any:
    written = 0

    def planted(writing: part.Part, chunk: Any) -> int:
        nonlocal written
        crc: int = put_chunk(writing, chunk)
        written += 1
        if written > 3 and number(writing._folder) >= first:
            die()
        return crc

    return planted


def _marked(write_index: Any, first: int) -> Any:
    def planted(index: Any, path: Path) -> None:
        write_index(index, path)
        if path.name.endswith(".done") and number(path.parent) >= first:
            die()

    return planted


def _published(publish: Any, first: int) -> Any:
    def planted(partial: Path, final: Path, *rest: Any) -> Any:
        index = publish(partial, final, *rest)
        if number(final) >= first:
            die()
        return index

    return planted


def _removing(rmtree: Any, first: int) -> Any:
    def planted(path: Any, **rest: Any) -> None:
        if str(path).endswith(catalog.DELETED) and number(Path(path)) + 2 >= first:
            next(Path(path).iterdir()).unlink()
            die()
        rmtree(path, **rest)

    return planted


def _copied(copy: Any, first: int) -> Any:
    def planted(saving: background.BackgroundSave, *rest: Any) -> None:
        copy(saving, *rest)
        if number(saving.final) >= first:
            die()

    return planted


def _after_folder(action: Any, first: int) -> Any:
    def planted(folder: Path, *rest: Any) -> None:
        action(folder, *rest)
        if number(folder) >= first:
            die()

    return planted


def _named(write_index: Any, first: int) -> Any:
    def planted(index: Any, path: Path) -> None:
        write_index(index, path)
        if number(path.parent) >= first:
            die()

    return planted


def _older(rmtree: Any, first: int) -> Any:
    def planted(path: Any, **rest: Any) -> None:
        if "-" in Path(path).name and number(Path(path)) + 2 >= first:
            next(Path(path).iterdir()).unlink()
            die()
        rmtree(path, **rest)

    return planted


def number(folder: Path) -> int:
    """Return the iteration in a folder's name."""
    return int(re.split(r"[.-]", folder.name.removeprefix("iter_"))[0])
