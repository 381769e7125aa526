"""Words of messages: flags by their fields, and the nearest values that work."""

from collections.abc import Iterable

from megatron.core.config import flag_of
from megatron.training.config import RunConfig


def flag(name: str) -> str:
    """Return the flag of a field of the run."""
    return flag_of(RunConfig, name)


def nearest_multiples(value: int, unit: int) -> str:
    """Return the multiples of ``unit`` below and above ``value``, as ``16 or 24``."""
    below, above = value // unit * unit, -(-value // unit) * unit
    return listed(sorted({n for n in (below, above) if n > 0}), " or ")


def nearest_of(choices: Iterable[int], value: int) -> str:
    """Return the choices next to ``value`` on either side."""
    ordered = sorted(choices)
    below = [n for n in ordered if n <= value][-1:]
    above = [n for n in ordered if n >= value][:1]
    return listed(sorted({*below, *above}), " or ")


def listed(values: Iterable[object], separator: str = ", ") -> str:
    """Return values joined for a message."""
    return separator.join(map(str, values))
