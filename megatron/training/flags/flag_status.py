"""What becomes of the flags that no config declares: Megatron's others, its old ones, DeepSpeed's.

`flag_status.tsv` beside this file is the table; a flag that a config declares works and does not
stand in it. Its columns:

    flag      the spelling; an alias has a row of its own. With a value (``--x old``) it is a former
              value of a flag that a config declares
    values    how many values follow: a number, ``*`` (any), ``+`` (one or more), ``?`` (0 or 1)
    status    successor, no effect or refused
    default   for a refused flag: a value that asks for nothing, and is accepted
    dry_run   what a dry run does with a refused flag. Empty: refuses it too. ``yes``: leaves it
              out, since the plan is right without it or errs on the safe side. Tokens: takes these
              for it. Another text: leaves it out, and the text says how the plan differs
    instead   for a successor, the tokens it stands for, ``{}`` being its values, in brackets when
              they count only if no other flag says otherwise; or such tokens for each value, as
              ``old => --new; none => --no-new``; for a refused flag, what to use
    why       one clause, for the message and the documentation
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Literal, cast

from megatron.core.utils import UserError

Status = Literal["works", "successor", "no effect", "refused"]


@dataclass(frozen=True)
class Row:
    """One flag of the table."""

    flag: str
    values: str
    status: Status
    default: str = ""
    dry_run: str = ""
    instead: str = ""
    why: str = ""

    @property
    def is_fallback(self) -> bool:
        """Return whether the successor counts only if no other flag says otherwise."""
        return self.instead.startswith("[")

    def expand(self, values: Sequence[str]) -> list[str]:
        """Return the command-line tokens that a successor stands for."""
        assert self.status == "successor", self
        text = self.instead.strip("[]")
        choices = self.alternatives
        if choices:
            given = " ".join(values)
            if given not in choices:
                raise UserError(f"{self.flag} is one of {', '.join(choices)}; not {given!r}")
            text = choices[given]
        tokens: list[str] = []
        for token in text.split():
            tokens += list(values) if token == "{}" else [token]
        return tokens

    @property
    def alternatives(self) -> dict[str, str]:
        """Return the tokens for each value of a successor that depends on its value."""
        pairs = [part.partition("=>") for part in self.instead.split(";") if "=>" in part]
        return {value.strip(): tokens.strip() for value, _, tokens in pairs}

    @property
    def in_a_plan(self) -> list[str]:
        """Return the tokens that a dry run takes for a refused flag."""
        return self.dry_run.split() if self.dry_run.startswith("--") else []

    @property
    def plan_note(self) -> str:
        """Return what a plan says of a refused flag that it leaves out."""
        if self.in_a_plan:
            return f"planned as {self.dry_run}"
        return "" if self.dry_run == "yes" else self.dry_run

    def asks_nothing(self, values: Sequence[str]) -> bool:
        """Return whether a refused flag was given the value that leaves it off."""
        given = " ".join(values)
        return self.default != "" and (given == self.default or _equal(given, self.default))

    def refusal(self, values: Sequence[str]) -> str:
        """Return what to tell somebody who gives a refused flag."""
        name = self.flag if " " in self.flag else " ".join([self.flag, *values])
        text = f"{name} is not supported: {self.why}"
        return f"{text}; {self.instead}" if self.instead else text


@functools.cache
def load() -> Mapping[str, Row]:
    """Return the table by flag."""
    source = resources.files("megatron.training.flags").joinpath("flag_status.tsv")
    header, *body = (line.split("\t") for line in source.read_text(encoding="utf-8").splitlines())
    assert header == list(Row.__annotations__), header
    table: dict[str, Row] = {}
    for flag, values, status, *texts in body:
        assert flag not in table, f"{flag} stands twice in the table of flags"
        table[flag] = Row(flag, values, cast(Status, status), *texts)
    return table


def _equal(given: str, default: str) -> bool:
    """Compare as numbers, so that 1.0 is 1."""
    try:
        return float(given) == float(default)
    except ValueError:
        return False
