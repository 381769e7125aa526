"""Would the ranks' calls find each other? Checked on what `comm.recording` wrote down.

NCCL runs the calls of a group one after another, in the order in which a rank made them, and each
waits until its partners have come to theirs. Ranks that disagree about the order wait for ever, or
read wrong data. gloo forgives much of that, so that a run on the CPU proves nothing. Here every
group's calls are replayed by NCCL's rule:

    collective       all ranks of the group stand before the same one, of equal shape and dtype
    send, receive    the peer stands before its counterpart
"""

from collections import deque
from collections.abc import Mapping, Sequence

from megatron.core.comm import Call

_Group = tuple[str, tuple[int, ...]]


def disagreement(calls: Mapping[int, Sequence[Call]]) -> str | None:
    """Return where the ranks of a group would wait for ever, or None.

    Args:
        calls: of every rank of the world, in order.
    """
    groups: dict[_Group, dict[int, deque[Call]]] = {}
    for rank, made in calls.items():
        for call in made:
            queues = groups.setdefault(
                (call.axis, call.ranks), {member: deque() for member in call.ranks}
            )
            queues[rank].append(call)
    found = (_replay(group, queues) for group, queues in groups.items())
    return next((text for text in found if text is not None), None)


def _replay(group: _Group, queues: dict[int, deque[Call]]) -> str | None:
    """Take calls that have found their partners off the queues; name what is left."""
    done = dict.fromkeys(queues, 0)
    moving = True
    while moving:
        moving = False
        for rank, queue in queues.items():
            partners = _partners(rank, queue[0], queues) if queue else ()
            for partner in partners:
                queues[partner].popleft()
                done[partner] += 1
            moving |= bool(partners)
    if not any(queues.values()):
        return None
    heads = [
        f"  rank {rank}, call {done[rank] + 1}: {queue[0] if queue else 'no more calls'}"
        for rank, queue in queues.items()
    ]
    axis, ranks = group
    return "\n".join([f"ranks {list(ranks)} of axis {axis} do not find each other:", *heads])


def _partners(rank: int, call: Call, queues: Mapping[int, deque[Call]]) -> tuple[int, ...]:
    """Return the ranks that go through ``call`` together, none while one of them is elsewhere."""
    if call.peer is None:
        agree = all(queue and queue[0] == call for queue in queues.values())
        return tuple(queues) if agree else ()
    counterpart = call._replace(name={"send": "receive", "receive": "send"}[call.name], peer=rank)
    theirs = queues[call.peer]
    return (rank, call.peer) if theirs and theirs[0] == counterpart else ()
