"""Whole parameters in equal shares: which parameters make a bucket, and which share holds each.

Replicas that shard their optimizer states update an equal share of every bucket. A rule that needs
whole matrices asks that none crosses a share's bound, so matrices are dealt to the shares, largest
first to the least filled one (Graham, 1969: at most a third above the best). What a share lacks to
the fullest one is padding:

    | share 0: w3 w1 | share 1: w0 w2 .. |     bucket 0; ".." is padding

Few matrices for many ranks would mean much padding, so a bucket goes on until it has little. All of
this is a function of the sizes, and so the same on all ranks and in a dry run.
"""

import heapq
from collections.abc import Sequence

SLACK = 0.125
"""Padding, relative to what is held, at which a bucket may end."""


def pack(sizes: Sequence[int], shares: int) -> tuple[int, list[int]]:
    """Return the capacity of a share, and the share of each of ``sizes``."""
    filled = [(0, share) for share in range(shares)]
    places = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        load, share = filled[0]
        heapq.heapreplace(filled, (load + sizes[index], share))
        places[index] = share
    return max(load for load, _ in filled), places


def batches(sizes: Sequence[int], shares: int, bucket_size: int | None) -> list[range]:
    """Return the runs of ``sizes`` that make a bucket each; without a bucket size, all in one.

    A bucket ends where it has ``bucket_size`` elements and little padding. To look is to pack
    anew, so one looks again only when the bucket is twice as large.
    """
    if bucket_size is None:
        return [range(len(sizes))]
    found: list[range] = []
    start, held, due = 0, 0, bucket_size
    for index, size in enumerate(sizes):
        held += size
        if held < due:
            continue
        if _padded(sizes[start : index + 1], shares) <= held * (1 + SLACK):
            found.append(range(start, index + 1))
            start, held, due = index + 1, 0, bucket_size
        else:
            due = 2 * held
    if start < len(sizes):
        found.append(range(start, len(sizes)))
        _join_last(found, sizes, shares)
    return found


def _join_last(found: list[range], sizes: Sequence[int], shares: int) -> None:
    """Join the last two runs where one bucket takes less room than two."""
    if len(found) < 2:
        return
    before, last = found[-2:]
    joined = range(before.start, last.stop)
    apart = sum(_padded(sizes[run.start : run.stop], shares) for run in (before, last))
    if _padded(sizes[joined.start : joined.stop], shares) < apart:
        found[-2:] = [joined]


def _padded(sizes: Sequence[int], shares: int) -> int:
    return pack(sizes, shares)[0] * shares
