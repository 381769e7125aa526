"""Loading: fill the boxes that this rank holds, from whichever boxes the files hold.

`load` compares first and reads after: what is missing, left over, or of another shape or kind is
listed whole and refused (or as ``strictness`` says), before any tensor is touched.

A floating-point state of another precision is converted to that of its target, which the precision
flags have chosen, and the report says so; nothing else is ever converted.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from megatron.core import comm
from megatron.core.dist_checkpointing.boxes import spans
from megatron.core.dist_checkpointing.format import CHUNK, CheckpointError
from megatron.core.dist_checkpointing.interface import Reader, TensorFacts
from megatron.core.dist_checkpointing.plan import Item, Piece, decoding
from megatron.core.dist_checkpointing.reader import READERS, DamagedError
from megatron.core.dist_checkpointing.save import attempt
from megatron.core.dist_checkpointing.strictness import (
    LENIENT_ABOUT_MISSING,
    STRICT_ABOUT_UNEXPECTED,
    Strictness,
)
from megatron.core.mesh import Axis
from megatron.core.progress import Told, untold

PART = 2 * CHUNK
"""Bytes of a tensor above which several threads share it."""
DECODED = READERS * PART
"""Bytes of numbers in a form of their own that are decoded at a time."""


@dataclass
class LoadReport:
    """What a load did on this rank; missing and unexpected are of all ranks."""

    hash: str
    bytes: int = 0
    tensors: int = 0
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    converted: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """Keys by (stored dtype, dtype here)."""
    substituted: dict[str, str] = field(default_factory=dict)
    """Stored key by the key that it stood in for."""


def load(
    items: Iterable[Item],
    checkpoint: Reader,
    world: Axis,
    *,
    strictness: Strictness = "raise_all",
    set_aside: Sequence[str] = (),
    verify: bool = False,
    fits: Callable[[], None] = lambda: None,
    told: Told = untold,
) -> LoadReport:
    """Fill every item from a checkpoint; a collective of ``world``.

    Args:
        items: what this rank holds.
        checkpoint: where from.
        world: all ranks; a stored tensor is unexpected when none of them asks for it.
        strictness: what to do with keys that have no partner.
        set_aside: beginnings of stored keys that are left out on purpose.
        verify: compare every checksum first (the ranks share the files).
        fits: called on every rank once everything is known to fit, before anything is filled.
        told: hears of each piece that was filled.

    Raises:
        CheckpointError: something does not fit or is damaged; nothing was filled.
    """
    items = list(items)
    if verify:
        check_bytes(checkpoint, world)
    chosen = [(item, source_of(item, checkpoint.tensors)) for item in items]
    report = LoadReport(checkpoint.hash)
    _compare(chosen, checkpoint, world, strictness, tuple(set_aside), report)
    fits()
    there = [(item, source) for item, source in chosen if source is not None]
    _fill_items(checkpoint, there, told)
    for item, source in there:
        _note(item, source, checkpoint.tensors[source], report)
    return report


def _compare(
    chosen: Sequence[tuple[Item, str | None]],
    checkpoint: Reader,
    world: Axis,
    strictness: Strictness,
    set_aside: tuple[str, ...],
    report: LoadReport,
) -> None:
    """Note what has no partner, and refuse what may not be; a collective of ``world``.

    Raises:
        CheckpointError: something does not fit; every rank raises.
    """
    stored = checkpoint.tensors
    misfits = [_misfit(item, source, stored) for item, source in chosen]
    wanted = {key for item, _ in chosen for key in (item.key, *item.sources)}
    report.missing = _all([item.key for item, source in chosen if source is None], world)
    asked = set(_all(wanted, world))
    left = [key for key in stored if key not in asked]
    report.unexpected = [key for key in left if not key.startswith(set_aside)]
    _refuse(
        checkpoint,
        [
            ("missing", report.missing if strictness not in LENIENT_ABOUT_MISSING else []),
            ("unexpected", report.unexpected if strictness in STRICT_ABOUT_UNEXPECTED else []),
            ("of another shape or type", _all([text for text in misfits if text], world)),
        ],
    )


def check_bytes(checkpoint: Reader, world: Axis, told: Told = untold) -> None:
    """Compare every checksum; the ranks share the files. A collective of ``world``.

    ``told`` hears of each piece that this rank has read.

    Raises:
        DamagedError: bytes are not those that were written, or cannot be read; by every rank.
    """
    mine = sorted(checkpoint.files)[world.coordinate :: world.size]
    found: list[str] = []
    problem = attempt(lambda: found.extend(checkpoint.damages(mine, told)), True)
    damages = _all(found if problem is None else [*found, problem], world)
    if damages:
        raise DamagedError(
            f"{checkpoint.folder} is damaged: the bytes are not those that were written:\n  "
            + "\n  ".join(damages)
        )


def _fill_items(checkpoint: Reader, there: Sequence[tuple[Item, str]], told: Told) -> None:
    """Fill items, each from a stored key; those in a form of their own after all others."""
    plain = [(item, source) for item, source in there if item.coded is None]
    _fill(checkpoint, [(source, piece) for item, source in plain for piece in item.pieces], told)
    for item, source in there:
        if item.coded is not None:
            for pieces in decoding(item, item.coded, DECODED):
                _fill(checkpoint, [(source, piece) for piece in pieces], told)


def _fill(checkpoint: Reader, wanted: Sequence[tuple[str, Piece]], told: Told) -> None:
    """Fill pieces by several threads, large ones in parts."""
    parts = [(source, part) for source, piece in wanted for part in _parts(piece)]
    with ThreadPoolExecutor(READERS) as readers:
        done = readers.map(lambda each: checkpoint.fill(*each), parts)
        for (source, part), _ in zip(parts, done, strict=True):  # raises what a thread raised
            told(source, part.tensor.nbytes)


def _parts(piece: Piece) -> Iterator[Piece]:
    """Yield runs of rows of a piece, of some chunks each."""
    if piece.tensor.nbytes <= PART:
        yield piece
        return
    ((first, _), *inner), rows = piece.box, piece.tensor.shape[0]
    step = max(rows * PART // piece.tensor.nbytes, 1)
    for start, stop in spans(0, rows, step):
        yield Piece(((first + start, first + stop), *inner), piece.tensor[start:stop])


def source_of(item: Item, tensors: Mapping[str, TensorFacts]) -> str | None:
    """Return the first stored key that can fill ``item``."""
    return next((key for key in item.sources or (item.key,) if key in tensors), None)


def _misfit(item: Item, source: str | None, tensors: Mapping[str, TensorFacts]) -> str | None:
    if source is None:
        return None
    stored = tensors[source]
    same_kind = stored.torch_dtype == item.dtype or (
        stored.torch_dtype.is_floating_point and item.dtype.is_floating_point
    )
    if same_kind and (stored.shape == item.shape or _is_padded(stored, item.shape)):
        return None
    here = str(item.dtype).removeprefix("torch.")
    return f"{source}: {stored.dtype} {list(stored.shape)}, here {here} {list(item.shape)}"


def _is_padded(stored: TensorFacts, shape: tuple[int, ...]) -> bool:
    """Return whether ``stored`` is a tensor of ``shape`` and rows that only pad it."""
    if not shape or stored.shape[1:] != shape[1:]:
        return False
    return 0 < stored.shape[0] - shape[0] < stored.padded_to


def _note(item: Item, source: str, stored: TensorFacts, report: LoadReport) -> None:
    """Count an item that was filled, and say what stood in for it or was converted."""
    report.bytes += sum(piece.tensor.nbytes for piece in item.pieces)
    report.tensors += 1
    if source != item.key:
        report.substituted[item.key] = source
    here = str(item.dtype).removeprefix("torch.")
    if stored.dtype != here:
        report.converted.setdefault((stored.dtype, here), []).append(item.key)


def _all(mine: Iterable[str], world: Axis) -> list[str]:
    """Return what any rank has, sorted."""
    return sorted(set().union(*comm.gather_objects(sorted(mine), world)))


def _refuse(checkpoint: Reader, problems: Sequence[tuple[str, list[str]]]) -> None:
    """Raise when any list has an entry; the message holds every entry."""
    parts = [
        f"{len(keys)} tensor(s) {what}:\n  " + "\n  ".join(keys) for what, keys in problems if keys
    ]
    if parts:
        raise CheckpointError(f"{checkpoint.folder} does not fit this run; " + "\n".join(parts))
