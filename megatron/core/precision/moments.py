"""How far a moment of Adam's may be off that is kept in a short format.

A step makes ``m`` of a moment into ``beta m + (1 - beta) x`` and rounds that to ``p`` bits, by at
most ``2^-p`` of what it becomes. Errors decay as the moment does, so that for steady ``x`` they add
up (``2^-p`` times the sum of ``beta^i``) to at most

    e = 2^-p / (1 - beta)        of the kept moment, which is from x / (1 + e) to x / (1 - e)

From 1 on that says nothing, and indeed such a moment may stand still. Take ``x = 0`` and ``m`` in
``[2^k, 2^(k+1))``: a step takes ``(1 - beta) m`` away, neighbours are ``2^(k+1-p)`` apart, so
rounding gives back what is less than ``2^(k-p)``: all of it, if ``m < 2^(k-p) / (1 - beta)``.

    1 - beta >= 2^-p                        no m stands still (at 2^k, the next below is nearer)
    1 - beta <  2^-p / (1 + 2^(1-p))        those do that are just above 2^k
    1 - beta <  2^-p / 2                    all do: bf16 at 0.999

A format is taken up to ``e = 1/2``, ``1 - beta >= 2^(1-p)``: then a second moment is at most twice
what it should be, and a step off by at most a factor of 1.42. At ``e = 1`` nothing stands still,
but a moment that has to fall by a factor of 10^4 stops far above its aim: bf16 with 0.996 at 20
times.

Nothing here imports torch.
"""

from megatron.core.utils import UserError

BITS = {"bf16": 8, "fp16": 11}
"""Bits of a number, the leading one included."""
LARGEST = {"bf16": 0.992, "fp16": 0.999}
"""Largest beta of each, for people."""
MOST = 0.5
"""Largest share of itself by which a moment may be off."""


def error(kind: str, beta: float) -> float:
    """Return by which share of itself a moment in a short format may be off."""
    return 2.0 ** -BITS[kind] / (1 - beta)


def is_sound(kind: str, beta: float) -> bool:
    """Return whether a moment may be kept in a format."""
    return kind == "fp32" or error(kind, beta) <= MOST


def shortest(beta: float) -> str:
    """Return the shortest format for a moment."""
    return next(kind for kind in (*BITS, "fp32") if is_sound(kind, beta))


def check(kind: str, beta: float, names: tuple[str, str]) -> None:
    """Refuse a format in which a moment would not follow the gradients.

    Args:
        kind: fp32, or a format of `BITS`.
        beta: decay of the moment.
        names: flags of the format and the decay.

    Raises:
        UserError: the moment might be off by more than a factor of two.
    """
    if is_sound(kind, beta):
        return
    bits, (dtype_flag, beta_flag) = BITS[kind], names
    finer = [f"{other} ({BITS[other]} bits)" for other in BITS if is_sound(other, beta)]
    ways = " or ".join(f"{dtype_flag} {other}" for other in (*finer, "fp32"))
    raise UserError(
        f"{dtype_flag} {kind} with {beta_flag} {beta:g}: a step takes {1 - beta:.2g} of a moment "
        f"away, and rounding to the {bits} bits of {kind} gives up to {2.0**-bits:.2g} of it back, "
        f"so that it stops far from where it should; use {ways}, or {beta_flag} of at most "
        f"{LARGEST[kind]}"
    )
