"""Megatron's layout strings: which layers each stage of a pipeline holds, written out.

``E`` is the embedding, ``t`` a layer, ``m`` a multi-token-prediction layer, ``L`` the head with the
loss; ``|`` ends a stage, ``*n`` repeats a letter or a group in parentheses, commas are for the eye:

    Et*3|(tt|)*29,m|L      32 stages: the embedding and 3 layers, 29 times 2 layers, m, the head

Stages are listed by position, so with several chunks per rank all first chunks come first. A stage
may be empty: it hands on what it gets.
"""

import re
from typing import NamedTuple, NoReturn

from megatron.core.utils import UserError

FLAG = "--pipeline-model-parallel-layout"
LONGEST = 100_000
"""Letters and bars that repetitions may make in all, far more than any model has layers."""


class LayoutStage(NamedTuple):
    """What one stage holds."""

    has_embedding: bool
    num_layers: int
    num_mtp_layers: int
    has_loss: bool


def parse_layout(text: str) -> list[LayoutStage]:
    """Return the stages of a layout string, by position.

    Raises:
        UserError: it is misspelled, or its ends are not where data enters and the loss is made.
    """
    stages = []
    for number, letters in enumerate(_expand(text).split("|")):
        match = re.fullmatch("(E?)(t*)(m*)(L?)", letters)
        if match is None:
            _refuse(text, f"stage {number} ({letters}) must be in the order E, t, m, L")
        embedding, layers, mtp, loss = match.groups()
        stages.append(LayoutStage(bool(embedding), len(layers), len(mtp), bool(loss)))
    for letter, flags, where in (
        ("E", [stage.has_embedding for stage in stages], 0),
        ("L", [stage.has_loss for stage in stages], len(stages) - 1),
    ):
        if sum(flags) != 1 or not flags[where]:
            at = ", ".join(str(number) for number, has in enumerate(flags) if has) or "no stage"
            _refuse(text, f"{letter} must stand in stage {where} alone, but stands in {at}")
    return stages


def _expand(text: str) -> str:
    """Return a layout string without repetitions, groups and commas."""
    tokens = re.findall(r"\*\s*\d+|\S", text.replace(",", " "))
    opened: list[list[str]] = [[]]
    grown = 0
    for index, token in enumerate(tokens):
        here = opened[-1]
        if token in "EtmL|":
            here.append(token)
        elif token == "(":
            opened.append([])
        elif token == ")" and len(opened) > 1:
            opened[-2].append("".join(opened.pop()))
        elif token[0] == "*" and len(token) > 1 and index and tokens[index - 1][0] not in "(*|":
            digits = token[1:].strip().lstrip("0") or "0"
            count = int(digits[:10])  # enough of them to be too many
            grown += len(here[-1]) * count
            if grown > LONGEST:
                _refuse(text, f"repetitions make more than {LONGEST:,} letters and bars")
            here[-1] *= count
        else:
            _refuse(text, f"{token!r} makes no sense after {''.join(tokens[:index])!r}")
    if len(opened) > 1:
        _refuse(text, "a parenthesis is not closed")
    return "".join(opened[0])


def _refuse(text: str, why: str) -> NoReturn:
    raise UserError(f"{FLAG} {text!r}: {why}; write it like 'Ett|(tt|)*2,tL'")
