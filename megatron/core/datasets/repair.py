"""Checking a pair of token files through and through, and mending an index.

What can be mended follows from the lengths and the token file: boundaries of documents that do not
end with the last sequence, wrong byte offsets, sequences beyond the end of a cut-off ``.bin``.
"""

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.indexed import Index, bin_path, idx_path, read_index, write_index
from megatron.core.datasets.sidecar import read_json, sidecar_path
from megatron.core.utils import UserError, atomic_path

BLOCK = 1 << 22


@dataclass
class Verdict:
    """What a full check found."""

    problems: list[str] = field(default_factory=list)
    largest_id: int | None = None
    tokens_read: int = 0


def verify(prefix: str, vocab_size: int | None = None) -> Verdict:
    """Check everything: offsets, boundaries, sizes and every token id.

    Args:
        prefix: the pair.
        vocab_size: ids must be below it; by default what the note beside the pair says.

    Raises:
        UserError: the index cannot be read at all.
    """
    index = read_index(prefix)
    verdict = Verdict(_index_problems(index))
    try:
        index.check_bin()
    except UserError as error:
        verdict.problems.append(str(error))
        return verdict
    if vocab_size is None and sidecar_path(prefix).is_file():
        vocab_size = read_json(sidecar_path(prefix)).get("tokenizer", {}).get("vocab_size")
    _scan(index, bin_path(prefix), vocab_size, verdict)
    return verdict


def _index_problems(index: Index) -> list[str]:
    problems = []
    lengths = index.sequence_lengths
    if len(lengths) and lengths.min() < 0:
        where = int(lengths.argmin())
        problems.append(f"{index.path}: sequence {where} has the negative length {lengths[where]}")
    expected = _offsets(lengths, index.dtype)
    wrong = np.flatnonzero(index.sequence_pointers != expected)
    if len(wrong):
        i = int(wrong[0])
        problems.append(
            f"{index.path}: {len(wrong)} byte offsets do not follow from the lengths, the first "
            f"of sequence {i}: {index.sequence_pointers[i]}, not {expected[i]}"
        )
    try:
        index.check_last_boundary()
    except UserError as error:
        problems.append(str(error))
    steps = np.diff(index.document_indices)
    if len(steps) and steps.min() < 0:
        where = int(np.flatnonzero(steps < 0)[0])
        problems.append(f"{index.path}: document {where} ends before it starts")
    return problems


def _offsets(lengths: npt.NDArray[np.int32], dtype: np.dtype[Any]) -> npt.NDArray[np.int64]:
    sizes = lengths.astype(np.int64) * dtype.itemsize
    offsets: npt.NDArray[np.int64] = np.cumsum(sizes) - sizes
    return offsets


def _scan(index: Index, path: Path, vocab_size: int | None, verdict: Verdict) -> None:
    """Read every token id."""
    if index.dtype.kind == "f":
        return
    reported = False
    with open(path, "rb") as file:
        while data := file.read(BLOCK * index.dtype.itemsize):
            ids = np.frombuffer(data, index.dtype)
            largest = int(ids.max())
            verdict.largest_id = max(largest, verdict.largest_id or 0)
            limit = largest + 1 if vocab_size is None else vocab_size
            bad = np.flatnonzero((ids >= limit) | (ids < 0))
            if len(bad) and not reported:
                place = verdict.tokens_read + int(bad[0])
                sequence = _sequence_at(index, place)
                verdict.problems.append(
                    f"{path}: token id {ids[bad[0]]} in sequence {sequence} is outside the "
                    f"vocabulary of {limit}"
                )
                reported = True
            verdict.tokens_read += len(ids)


def _sequence_at(index: Index, token: int) -> int:
    ends = np.cumsum(index.sequence_lengths, dtype=np.int64)
    return int(np.searchsorted(ends, token, side="right"))


def repair(prefix: str) -> list[str]:
    """Mend the index of a pair; the old one stays as ``PREFIX.idx.orig``.

    Returns:
        What was changed; empty when nothing had to be.

    Raises:
        UserError: the damage cannot be mended.
    """
    index = read_index(prefix)
    path = bin_path(prefix)
    if index.has_modes:
        raise UserError(f"{index.path} is a multimodal set; these are not mended")
    if not path.is_file():
        raise UserError(f"{path} does not exist; without the tokens there is nothing to mend")
    lengths = np.array(index.sequence_lengths)
    if len(lengths) and lengths.min() < 0:
        raise UserError(f"{index.path} has negative lengths; build the pair again")
    changes: list[str] = []
    offsets = _offsets(lengths, index.dtype)
    if (index.sequence_pointers != offsets).any():
        changes.append("byte offsets: computed again from the lengths")
    size = path.stat().st_size
    ends = offsets + lengths.astype(np.int64) * index.dtype.itemsize
    described = int(ends[-1]) if len(ends) else 0
    if size > described:
        raise UserError(
            f"{path} has {size} bytes but {index.path} describes {described}: where the rest "
            "belongs cannot be known; build the pair again"
        )
    kept = int(np.searchsorted(ends, size, side="right"))
    if kept < len(lengths):
        changes.append(f"sequences: {len(lengths) - kept} beyond the end of {path} are dropped")
        lengths = lengths[:kept]
    documents, change = _boundaries(np.array(index.document_indices), kept)
    if change:
        changes.append(change)
    if not changes:
        return []
    if size > (used := int(ends[kept - 1]) if kept else 0):
        os.truncate(path, used)
        changes.append(f"{path}: {size - used} bytes of the last, cut-off sequence are dropped")
    target = idx_path(prefix)
    shutil.copy2(target, f"{target}.orig")
    with atomic_path(target) as temporary:
        write_index(temporary, index.dtype, lengths, documents)
    return changes


def _boundaries(
    documents: npt.NDArray[np.int64], sequences: int
) -> tuple[npt.NDArray[np.int64], str]:
    """Return boundaries that are in order and end at ``sequences``, and what was changed.

    Where every known document is one sequence, so are those without a boundary; else the sequences
    after the last boundary become one document.
    """
    good = documents[(documents >= 0) & (documents <= sequences)]
    in_order = len(good) == len(documents) and not (np.diff(good) < 0).any()
    if in_order and len(good) and good[0] == 0 and good[-1] == sequences:
        return documents, ""
    good = np.unique(np.append(good, 0))
    rest = sequences - int(good[-1])
    if (np.diff(good) == 1).all():
        good = np.arange(sequences + 1)
        what = f"each of the last {rest} sequences became a document" if rest else ""
    elif rest:
        good = np.append(good, sequences)
        what = f"the last {rest} sequences became one document"
    else:
        what = ""
    before = int(documents[-1]) if len(documents) else "absent"
    change = f"document boundaries: the last was {before}, now {good[-1]}"
    return good, change + (f"; {what}" if what else "")
