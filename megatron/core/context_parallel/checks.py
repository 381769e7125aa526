"""What context parallelism asks of a run, checked before anything is built; needs no torch."""

import math
from collections.abc import Sequence

from megatron.core.utils import UserError

KINDS = ("p2p", "all_gather", "a2a", "a2a+p2p")
"""Values of --cp-comm-type: how a layer's queries meet the keys of other ranks."""


def check_sequence(sequence: int, cp: int, tp: int = 1, *, flag: str = "--seq-length") -> None:
    """Check that a sequence can be cut over context- and then tensor-parallel ranks.

    ``tp`` is 1 unless the tensor-parallel ranks share the sequence too.

    Raises:
        UserError: it cannot; the message names the nearest lengths that can.
    """
    unit = cp * math.lcm(2, tp) if cp > 1 else tp
    if sequence % unit == 0:
        return
    below = sequence // unit * unit
    choices = " or ".join(str(length) for length in (below, below + unit) if length > 0)
    parts = [f"2 x --context-parallel-size ({cp}) chunks"] if cp > 1 else []
    if tp > 1:
        parts.append(
            f"--tensor-model-parallel-size ({tp}), whose ranks share the sequence under "
            "--sequence-parallel"
        )
    raise UserError(
        f"{flag} ({sequence}) is not divisible by {unit}, which follows from "
        f"{' and '.join(parts)}; try {choices}"
    )


def check_heads(kind: str, heads: int, tp: int, cp: int, sizes: Sequence[int] | None) -> None:
    """Check that an all-to-all has a head for every rank it exchanges with.

    Raises:
        UserError: it has not.
    """
    if cp == 1 or "a2a" not in kind:
        return
    flag, ways = "--context-parallel-size", cp
    if kind == "a2a+p2p":
        flag, ways = "the first of --hierarchical-context-parallel-sizes", check_sizes(sizes, cp)[0]
    if heads % (tp * ways):
        fitting = [n for n in range(2, ways) if heads % (tp * n) == 0]
        lower = f"lower the latter to {fitting[-1]} or " if fitting else ""
        raise UserError(
            f"--cp-comm-type {kind} cuts attention heads: --num-attention-heads ({heads}) must be "
            f"divisible by --tensor-model-parallel-size ({tp}) x {flag} ({ways}); "
            f"{lower}choose --cp-comm-type p2p, which takes any number of heads"
        )


def check_sizes(sizes: Sequence[int] | None, cp: int) -> tuple[int, int]:
    """Return the inner (all-to-all) and outer (ring) ways of ``a2a+p2p``.

    Raises:
        UserError: they are not two sizes whose product is the context-parallel size.
    """
    inner, outer = sizes if sizes is not None and len(sizes) == 2 else (0, 0)
    if inner < 1 or outer < 1 or inner * outer != cp:
        given = "absent" if sizes is None else " ".join(map(str, sizes))
        pairs = [f"{n} {cp // n}" for n in range(2, cp) if cp % n == 0] or [f"{cp} 1"]
        raise UserError(
            f"--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes (now {given}) to "
            f"be two sizes with product --context-parallel-size ({cp}); try {' or '.join(pairs)}"
        )
    return inner, outer
