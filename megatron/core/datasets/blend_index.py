"""Which member of a blend gives sample ``i``: the one furthest behind its share.

With weights ``w`` and ``taken`` samples so far, sample ``i`` goes to the member with the largest
``w * max(i, 1) - taken``, the first of equals; its samples are numbered in turn. Each member thus
stays within a sample or so of its share at every moment, whatever the length of the run.

The rule is a chain: each choice needs the one before. Three equal ways to walk it: the optional
compiled helper; a plain loop; and, for long blends without the helper, many stretches at once, each
from a guessed state, repeated until every stretch starts where the one before it ended. A wrong
guess is forgotten after a few choices (the lag of a member pulls it back), so a few rounds do, and
the result is exact by construction, not by luck: stretch 0 starts from the true state, and equality
at every seam carries it to the end.
"""

from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.samples import HELPERS

MAX_MEMBERS = 32767
"""Members are numbered in 16 bits."""

STRETCHES = 2048
LOOP_UP_TO = 20_000
"""Blends up to this length are walked one by one."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def blend_by_weight(
    weights: list[float], size: int, helpers: ModuleType | None = HELPERS
) -> tuple[npt.NDArray[np.int16], Ints]:
    """Return (member, its sample number) of each of ``size`` samples.

    Args:
        weights: shares, summing to one.
        size: samples in the blend.
        helpers: the compiled helper, or None for numpy.
    """
    assert 0 < len(weights) <= MAX_MEMBERS
    shares = np.array(weights, dtype=np.float64)
    if helpers is not None:
        return helpers.blend(shares, size)  # type: ignore[no-any-return]
    if size <= LOOP_UP_TO:
        members, _ = _walk(shares, np.zeros(len(shares)), 0, size)
    else:
        members = _walk_stretches(shares, size)
    return members, _numbered(members, len(weights))


def blend_all(
    sizes: list[int], helpers: ModuleType | None = HELPERS
) -> tuple[npt.NDArray[np.int16], Ints]:
    """Return (member, its sample number) when every sample of every member is taken once.

    The weights are the sizes, and a member that is used up takes no further part.
    """
    assert 0 < len(sizes) <= MAX_MEMBERS
    limits = np.array(sizes, dtype=np.int64)
    if helpers is not None:
        return helpers.blend_all(limits)  # type: ignore[no-any-return]
    shares = limits / float(limits.sum())
    members, numbers = blend_by_weight(shares.tolist(), int(limits.sum()), None)
    # While no used-up member would be chosen, the rule is the plain one: keep that much.
    beyond = np.flatnonzero(numbers >= limits[members])
    if len(beyond):
        place = int(beyond[0])
        taken = np.bincount(members[:place], minlength=len(sizes))
        members[place:] = _walk_to_the_end(shares, taken, limits, place)
        numbers = _numbered(members, len(sizes))
    return members, numbers


def _walk_to_the_end(shares: Floats, taken: Ints, limits: Ints, start: int) -> list[int]:
    """Return the choices from sample ``start`` on, passing over members that are used up."""
    chosen = []
    for i in range(start, int(limits.sum())):
        lags = np.where(taken < limits, shares * max(i, 1) - taken, -np.inf)
        member = int(lags.argmax())
        chosen.append(member)
        taken[member] += 1
    return chosen


def _walk(
    shares: Floats, taken: Floats, start: int, stop: int
) -> tuple[npt.NDArray[np.int16], Floats]:
    """Return the choices for samples ``start`` to ``stop`` and what is taken after them."""
    members = np.empty(stop - start, dtype=np.int16)
    taken = taken.copy()
    lags = np.empty_like(shares)
    for i in range(start, stop):
        np.multiply(shares, max(i, 1), out=lags)
        lags -= taken
        chosen = lags.argmax()
        members[i - start] = chosen
        taken[chosen] += 1
    return members, taken


def _walk_stretches(shares: Floats, size: int) -> npt.NDArray[np.int16]:
    """Return the choices for all samples by walking many stretches side by side."""
    # A stretch shorter than this forgets a wrong guess too rarely to pay.
    length = max(-(-size // STRETCHES), 512)
    count = -(-size // length)
    starts = np.arange(count, dtype=np.int64) * length
    begin = _guess(shares, starts)
    begin[0] = 0
    members = np.empty((count, length), dtype=np.int16)
    end = np.empty_like(begin)
    stale = np.arange(count)
    while len(stale):
        members[stale], end[stale] = _walk_abreast(shares, begin[stale], starts[stale], length)
        stale = 1 + np.flatnonzero((begin[1:] != end[:-1]).any(axis=1))
        begin[stale] = end[stale - 1]
    return members.reshape(-1)[:size]


def _walk_abreast(
    shares: Floats, taken: Floats, starts: Ints, length: int
) -> tuple[npt.NDArray[np.int16], Floats]:
    """Walk ``length`` samples of several stretches, one row each, in step."""
    count = len(starts)
    members = np.empty((length, count), dtype=np.int16)
    taken = taken.copy()
    lags = np.empty_like(taken)
    rows = np.arange(count) * len(shares)
    flat = taken.reshape(-1)
    for step in range(length):
        np.multiply.outer(np.maximum(starts + step, 1).astype(np.float64), shares, out=lags)
        lags -= taken
        chosen = lags.argmax(axis=1)
        members[step] = chosen
        flat[rows + chosen] += 1
    return members.T, taken


def _guess(shares: Floats, starts: Ints) -> Floats:
    """Return likely counts before each start: whole shares, the rest to the largest remainders."""
    exact = starts[:, None] * shares
    taken = np.floor(exact)
    missing = starts - taken.sum(axis=1).astype(np.int64)
    rank = np.argsort(np.argsort(taken - exact, axis=1, kind="stable"), axis=1, kind="stable")
    guess: Floats = taken + (rank < missing[:, None])
    return guess


def _numbered(members: npt.NDArray[np.int16], count: int) -> Ints:
    """Return, for each sample, how many of its member came before it."""
    numbers = np.empty(len(members), dtype=np.int64)
    order: npt.NDArray[Any] = np.argsort(members, kind="stable")
    totals = np.bincount(members, minlength=count)
    first = np.repeat(np.cumsum(totals) - totals, totals)
    numbers[order] = np.arange(len(members)) - first
    return numbers
