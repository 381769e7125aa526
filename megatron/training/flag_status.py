"""What becomes of the flags that no config declares: Megatron's others, its old ones, DeepSpeed's.

`flag_status.tsv` beside this file is the table; a flag that a config declares works and does not
stand in it. Its columns:

    flag      the spelling; an alias has a row of its own
    values    how many values follow: a number, ``*`` (any), ``+`` (one or more), ``?`` (0 or 1)
    status    successor, no effect or refused
    default   for a refused flag: a value that asks for nothing, and is accepted
    dry_run   yes where a dry run accepts a refused flag, since its plan is right without it or
              errs on the safe side
    instead   for a successor, the tokens it stands for, ``{}`` being its values, in brackets when
              they count only if no other flag says otherwise; for a refused flag, what to use
    why       one clause, for the message and the documentation
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Literal, cast

Status = Literal["works", "successor", "no effect", "refused"]


@dataclass(frozen=True)
class Row:
    """One flag of the table."""

    flag: str
    values: str
    status: Status
    default: str
    dry_run: bool
    instead: str
    why: str

    @property
    def is_fallback(self) -> bool:
        """Return whether the successor counts only if no other flag says otherwise."""
        return self.instead.startswith("[")

    def expand(self, values: Sequence[str]) -> list[str]:
        """Return the command-line tokens that a successor stands for."""
        assert self.status == "successor", self
        tokens: list[str] = []
        for token in self.instead.strip("[]").split():
            tokens += list(values) if token == "{}" else [token]
        return tokens

    def asks_nothing(self, values: Sequence[str]) -> bool:
        """Return whether a refused flag was given the value that leaves it off."""
        given = " ".join(values)
        return self.default != "" and (given == self.default or _equal(given, self.default))

    def refusal(self, values: Sequence[str]) -> str:
        """Return what to tell somebody who gives a refused flag."""
        text = f"{' '.join([self.flag, *values])} is not supported: {self.why}"
        return f"{text}; {self.instead}" if self.instead else text


def load() -> Mapping[str, Row]:
    """Return the table by flag."""
    source = resources.files("megatron.training").joinpath("flag_status.tsv")
    header, *body = (line.split("\t") for line in source.read_text(encoding="utf-8").splitlines())
    assert header == list(Row.__annotations__), header
    table: dict[str, Row] = {}
    for flag, values, status, default, dry_run, *texts in body:
        assert flag not in table, f"{flag} stands twice in the table of flags"
        table[flag] = Row(flag, values, cast(Status, status), default, dry_run == "yes", *texts)
    return table


def _equal(given: str, default: str) -> bool:
    """Compare as numbers, so that 1.0 is 1."""
    try:
        return float(given) == float(default)
    except ValueError:
        return False
