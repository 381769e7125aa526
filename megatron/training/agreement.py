"""Do all ranks read and write the same things? Found out before the first iteration.

Flags alone do not tell: files of one name may differ from machine to machine, and a folder may be a
machine's own. Ranks with different samples would train a mixture without a word, and one that saves
elsewhere would be missed at the first save.
"""

import os
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core import comm
from megatron.core.datasets.blended import BlendedDataset, Dataset, Member
from megatron.core.datasets.checks import lengths_mark
from megatron.core.datasets.config import DataConfig
from megatron.core.datasets.indexed import bin_path, idx_path
from megatron.core.datasets.sources import read_sources
from megatron.core.mesh import Axis
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.utils import UserError
from megatron.training.data import RunData
from megatron.training.processes.rank_zero import from_first

PROBES = 16
"""Samples of a data set whose tokens are compared."""
NAMED = 3
"""Corpora and ranks that a message names."""


def check_inputs(world: Axis, tokenizer: Tokenizer, data: RunData) -> None:
    """Refuse ranks that read different samples or tokenizers; a collective of ``world``.

    Raises:
        UserError: by every rank, naming those that differ from the first and what they read.
    """
    if world.size > 1:
        _compare(world, {"tokenizer": (tokenizer.fingerprint(), "")} | dict(_data_marks(data)))


def check_sources(world: Axis, config: DataConfig) -> None:
    """Refuse ranks whose token files differ, before any index is built; a collective of ``world``.

    A rank that leaves the building to another would wait for an index that nobody makes. Files that
    are missing are left to whoever opens them.

    Raises:
        UserError: by every rank, naming those that differ from the first and what they read.
    """
    if world.size == 1 or config.dataloader_type == "external":
        return
    blends = {
        split: source.blend
        for split, source in read_sources(config).items()
        if source is not None and source.blend is not None
    }
    files = {prefix: _file_mark(prefix) for one in blends.values() for prefix in one.prefixes}
    if not all(comm.gather_objects(None not in files.values(), world)):
        return
    marks = {
        f"set of files ({split})": (
            str((one.shares, [files[prefix] for prefix in one.prefixes])),
            ", ".join(one.prefixes[:NAMED]),
        )
        for split, one in blends.items()
    }
    _compare(world, marks)


def _file_mark(prefix: str) -> list[int] | None:
    """Return sizes and sums over the heads of a pair of token files; None if one is not there."""
    mark = []
    for path in (idx_path(prefix), bin_path(prefix)):
        try:
            with open(path, "rb") as file:
                mark += [os.fstat(file.fileno()).st_size, zlib.crc32(file.read(1 << 16))]
        except OSError:
            return None
    return mark


def _compare(world: Axis, mine: Mapping[str, tuple[str, str]]) -> None:
    """Refuse marks, each with a description, that differ from those of the first rank."""
    everyone = comm.gather_objects({name: mark for name, (mark, _) in mine.items()}, world)
    if all(marks == everyone[0] for marks in everyone):
        return
    told = comm.gather_objects({name: text for name, (_, text) in mine.items()}, world)
    for name, mark in everyone[0].items():
        others = [rank for rank, marks in enumerate(everyone) if marks.get(name) != mark]
        if others:
            first = others[0]
            raise UserError(
                f"{_ranks(others)} another {name} than rank 0: rank {first} has "
                f"{told[first].get(name) or everyone[first].get(name)}, rank 0 "
                f"{told[0][name] or mark}; all ranks must read the same, under whatever path"
            )
    raise AssertionError("ranks differ in a data set that rank 0 does not have")


def check_save_folder(world: Axis, save: str | None) -> None:
    """Refuse a --save that is not one folder for all ranks; a collective of ``world``.

    The first rank leaves a file there, for which the others look.

    Raises:
        UserError: by every rank, naming those that do not see it.
    """
    if save is None or world.size == 1:
        return
    token, place = from_first(world, lambda: (_leave_token(save), os.path.abspath(save)))
    try:
        sees = Path(save, token).exists()
        everyone = comm.gather_objects(None if sees else os.path.abspath(save), world)
    finally:
        if world.coordinate == 0:
            Path(save, token).unlink(missing_ok=True)
    blind = [rank for rank, folder in enumerate(everyone) if folder is not None]
    if blind:
        raise UserError(
            f"{_ranks(blind)} another folder than rank 0 as --save: what rank 0 wrote to {place} "
            f"is not in {everyone[blind[0]]} of rank {blind[0]}; a checkpoint needs one folder, "
            "shared by all machines"
        )


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    more = f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
    return f"ranks {', '.join(map(str, ranks[:NAMED]))}{more} have"


def _leave_token(save: str) -> str:
    try:
        Path(save).mkdir(parents=True, exist_ok=True)
        handle, path = tempfile.mkstemp(prefix=".seen-by-all.", dir=save)
    except OSError as error:
        raise UserError(f"--save {save} cannot be written to: {error.strerror}") from None
    os.close(handle)
    return os.path.basename(path)


def _data_marks(data: RunData) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the name, a mark of the content and a description of each data set of a run."""
    valid = [
        (f"validation set {number}" if number else "validation set", one)
        for number, one in enumerate(data.valid)
    ]
    for name, dataset in (("training set", data.train), *valid, ("test set", data.test)):
        if isinstance(dataset, Dataset):
            yield name, (str(_mark(dataset)), _described(dataset))
        elif hasattr(dataset, "__len__"):  # a program's own: what it holds is its business
            yield name, (f"{len(dataset)} samples", "")


def _members(dataset: Dataset) -> Sequence[Member]:
    return dataset.members if isinstance(dataset, BlendedDataset) else [dataset]


def _described(dataset: Dataset) -> str:
    members = _members(dataset)
    names = ", ".join(
        f"{one.source.name} ({len(one.source.sequence_lengths)} sequences)"
        for one in members[:NAMED]
    )
    more = f" and {len(members) - NAMED} more" if len(members) > NAMED else ""
    return f"{len(dataset)} samples of {names}{more}"


def _mark(dataset: Dataset) -> Mapping[str, Any]:
    """Return what tells samples from others: sizes, rows of every corpus, tokens of a few."""
    members = []
    for one in _members(dataset):
        lengths = one.source.sequence_lengths
        members.append(lengths_mark(lengths, (0, len(lengths))) | {"size": len(one)})
    probes = np.unique(np.linspace(0, len(dataset) - 1, PROBES, dtype=np.int64)).tolist()
    tokens = 0
    for number in probes if len(dataset) else []:
        if isinstance(dataset, BlendedDataset):
            member = dataset.members[int(dataset.index[0][number])]
            at = int(dataset.index[1][number])
        else:
            member, at = dataset, number
        tokens = zlib.crc32(np.ascontiguousarray(member.text(at)).tobytes(), tokens)
    drawn = dataset.consumed(len(dataset)) if isinstance(dataset, BlendedDataset) else []
    return {"size": len(dataset), "members": members, "drawn": drawn, "tokens": tokens}
