"""What becomes of each flag of a command line: taken, renamed, without effect, left out, refused.

`judge` answers for one flag; `apply` turns all that were given into those that configs declare.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron.core.config import Spec
from megatron.core.utils import UserError
from megatron.training.flags.command_line import Given, Vocabulary, normalise, read_command_line
from megatron.training.flags.flag_status import Row

Kind = Literal["same", "renamed", "no effect", "refused"]


@dataclass(frozen=True)
class Verdict:
    """What becomes of one flag."""

    given: Given
    kind: Kind
    row: Row | None
    """Where the table of flags says so."""

    @property
    def tokens(self) -> list[str]:
        """Return the words that an old spelling stands for."""
        assert self.row is not None
        return self.row.expand([str(value) for value in self.given.values])

    @property
    def refusal(self) -> str:
        """Return the message for a refused flag."""
        assert self.row is not None
        return self.row.refusal([str(value) for value in self.given.values])


@dataclass(frozen=True)
class Applied:
    """The given flags after the table of flags was applied."""

    given: list[Given]
    """Flags that configs declare; later ones win."""
    no_effect: tuple[str, ...]
    renamed: tuple[str, ...]
    left_out: tuple[str, ...]
    """Flags that a run refuses and this plan leaves out."""


def judge(given: Given, vocabulary: Vocabulary) -> Verdict:
    """Return what becomes of one flag."""
    row = given.target
    values = [str(value) for value in given.values]
    if isinstance(row, Spec):
        former = vocabulary.targets.get(normalise(" ".join([row.flag, *values])))
        if not values or not isinstance(former, Row):
            return Verdict(given, "same", None)
        row = former
    if row.status == "successor":
        return Verdict(given, "renamed", row)
    if row.status == "refused" and not row.asks_nothing(values):
        return Verdict(given, "refused", row)
    return Verdict(given, "no effect", row)


def apply(given: Sequence[Given], vocabulary: Vocabulary, dry_run: bool) -> Applied:
    """Replace old spellings, set aside flags without effect, refuse what is refused.

    Raises:
        UserError: some flags are refused; all of them are named.
    """
    found: list[Given] = []
    fallbacks: list[Given] = []
    no_effect: list[str] = []
    renamed: list[str] = []
    left_out: list[str] = []
    refused: list[str] = []
    for item in given:
        verdict = judge(item, vocabulary)
        row = verdict.row
        if row is None:
            found.append(item)
        elif verdict.kind == "renamed":
            tokens = verdict.tokens
            inner = apply(_successors(item, tokens, vocabulary), vocabulary, dry_run)
            (fallbacks if row.is_fallback else found).extend(inner.given)
            no_effect += inner.no_effect
            left_out += inner.left_out
            renamed.append(f"{item.text} -> {' '.join(tokens)}")
        elif verdict.kind == "no effect":
            no_effect.append(item.text)
        elif dry_run and row.dry_run:
            found += _successors(item, row.in_a_plan, vocabulary)
            left_out.append(f"{item.text} ({row.plan_note})" if row.plan_note else item.text)
        else:
            refused.append(verdict.refusal)
    if refused:
        raise UserError("\n".join(dict.fromkeys(refused)))
    return Applied([*fallbacks, *found], _once(no_effect), _once(renamed), _once(left_out))


def _successors(item: Given, tokens: Sequence[str], vocabulary: Vocabulary) -> list[Given]:
    return [
        Given(new.flag, new.values, item.place, new.target)
        for new in read_command_line(tokens, vocabulary)
    ]


def _once(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))
