"""What ``[``, ``test`` and ``[[ ]]`` say of known words, and what a branch would change."""

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from megatron.training.shell.syntax import (
    Arithmetic,
    Case,
    For,
    If,
    Node,
    Not,
    Sequence_,
    Simple,
    Test,
    While,
)
from megatron.training.shell.words import Variables, joined

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^]]*\])?(\+?)=(.*)", re.DOTALL)
READING = ("read", "mapfile", "readarray", "getopts")


def condition(raw: Sequence[str], patterns: bool, variables: Variables) -> bool | None:
    """Return the value of a test, None if it hangs on something unknown.

    Args:
        raw: its words, with quotes and variables.
        patterns: the right side of ``==`` is a pattern, as in ``[[ ]]``.
        variables: what is known.
    """
    for joint, whole in (("||", any), ("-o", any), ("&&", all), ("-a", all)):
        if joint in raw:
            at = list(raw).index(joint)
            parts = [condition(p, patterns, variables) for p in (raw[:at], raw[at + 1 :])]
            decisive = whole is any
            if decisive in parts:
                return decisive
            return None if None in parts else not decisive
    if raw and raw[0] == "!":
        status = condition(raw[1:], patterns, variables)
        return None if status is None else not status
    if raw and raw[0] == "(" and raw[-1] == ")":
        return condition(raw[1:-1], patterns, variables)
    if len(raw) == 2 and raw[0].startswith("-") and raw[0] not in ("-z", "-n"):
        return None  # a question about a file
    words = [variables.emptied(joined(word, variables)) for word in raw]
    if any(word is None for word in words):
        return None
    return _test([word for word in words if word is not None], patterns)


def assigned_names(node: Node | None) -> Iterator[str]:
    """Yield the variables that a branch or a loop's body would set."""
    match node:
        case Simple():
            yield from _assigned_by(node.words)
        case Arithmetic():
            if found := re.match(r"\s*([A-Za-z_]\w*)\s*(\+\+|--|[-+*/]?=(?!=))", node.text):
                yield found[1]
        case Sequence_():
            for _, part in node.parts:
                yield from assigned_names(part)
        case Not() | For():
            yield from assigned_names(node.body)
        case While():
            yield from assigned_names(node.condition)
            yield from assigned_names(node.body)
        case If() | Case():
            for _, body in node.branches:
                yield from assigned_names(body)


def _assigned_by(words: Sequence[str]) -> Iterator[str]:
    own = next((i for i, word in enumerate(words) if not ASSIGNMENT.match(word)), 0)
    words = words[own:]  # IFS=, read ... sets IFS for read alone
    reads = bool(words) and words[0] in READING
    for word in words:
        if found := ASSIGNMENT.match(word):
            yield found[1]
        elif reads and re.fullmatch(r"[A-Za-z_]\w*", word) and word not in READING:
            yield word


def reads_input(node: Node) -> bool:
    """Return whether a loop's condition takes what its body works on, as ``while read`` does."""
    match node:
        case Simple():
            words = [word for word in node.words if not ASSIGNMENT.fullmatch(word)]
            return bool(words) and words[0] in READING
        case Sequence_():
            return any(reads_input(part) for _, part in node.parts)
        case Not():
            return reads_input(node.body)
    return False


def matters(node: Node) -> bool:
    """Return whether a branch could change a launch: it assigns, or runs something."""
    match node:
        case Simple():
            return any(ASSIGNMENT.match(word) or ".py" in word for word in node.words)
        case Sequence_():
            return any(matters(part) for _, part in node.parts)
        case Not() | For() | While():
            return matters(node.body)
        case If() | Case():
            return any(matters(body) for _, body in node.branches)
    return False


def as_text(node: Node | None) -> str:
    """Return a condition about as it was written."""
    match node:
        case Simple() | Test():
            return " ".join(node.words)
        case Not():
            return f"! {as_text(node.body)}"
        case Arithmetic():
            return f"(({node.text}))"
        case Sequence_():
            return "".join(
                f" {joint} " * (i > 0) + as_text(p) for i, (joint, p) in enumerate(node.parts)
            )
    return "a condition"


def _test(words: Sequence[str], patterns: bool) -> bool | None:
    """Return the value of a test of known words."""
    numbers: Mapping[str, Callable[[int, int], bool]] = {
        "-eq": lambda a, b: a == b,
        "-ne": lambda a, b: a != b,
        "-lt": lambda a, b: a < b,
        "-le": lambda a, b: a <= b,
        "-gt": lambda a, b: a > b,
        "-ge": lambda a, b: a >= b,
    }
    match words:
        case ["-z", text]:
            return text == ""
        case ["-n", text] | [text] if text != "-z":
            return text != ""
        case [left, "=" | "==", right]:
            return fnmatch.fnmatchcase(left, right) if patterns else left == right
        case [left, "!=", right]:
            return not (fnmatch.fnmatchcase(left, right) if patterns else left == right)
        case [left, sign, right] if sign in numbers:
            try:
                return numbers[sign](int(left), int(right))
            except ValueError:
                return None
        case [left, "=~", right]:
            try:
                return re.search(right, left) is not None
            except re.error:
                return None
    return None
