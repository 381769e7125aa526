"""Settings of parameters by name, as --param-group-overrides gives them; no torch here."""

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from megatron.core.utils import UserError


@dataclass(frozen=True)
class Override:
    """Settings of the parameters whose name matches a pattern."""

    pattern: str
    lr_mult: float = 1.0
    wd_mult: float = 1.0
    rule: str | None = None
    """Update rule; that of the parameter's kind when absent."""

    def matches(self, name: str) -> bool:
        """Return whether the pattern fits a parameter's name."""
        return fnmatchcase(name, self.pattern)


def read_override(text: str) -> Override:
    """Return what one value of --param-group-overrides says.

    >>> read_override("decoder.layers.*.mlp.*:lr_mult=0.5")
    Override(pattern='decoder.layers.*.mlp.*', lr_mult=0.5, wd_mult=1.0, rule=None)

    Raises:
        UserError: it cannot be read.
    """
    pattern, separator, words = text.rpartition(":")
    settings: dict[str, Any] = {}
    for word in words.split(","):
        name, _, value = (part.strip() for part in word.partition("="))
        if name in ("lr_mult", "wd_mult") and name not in settings:
            settings[name] = _factor(text, value)
        elif name == "optimizer" and "rule" not in settings:
            settings["rule"] = value
        else:
            separator = ""
    if not (separator and pattern):
        raise UserError(
            f"--param-group-overrides {text!r} is not PATTERN:NAME=VALUE,... with the names "
            "lr_mult, wd_mult and optimizer, each at most once"
        )
    return Override(pattern, **settings)


def _factor(text: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise UserError(
            f"--param-group-overrides {text!r}: {value!r} is no factor; give a number from 0"
        )
    return number
