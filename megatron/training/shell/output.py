"""What a command prints, where its words say it: echo, printf, cat, basename, dirname, expr."""

import os.path
import re
from collections.abc import Sequence

from megatron.training.shell.arithmetic import Unknown, evaluated
from megatron.training.shell.words import ATOM, unescaped

PRINTING = ("echo", "printf", "cat", "basename", "dirname", "expr")
CONVERSION = re.compile(r"%(%|-?\d*(?:\.\d+)?[sdigf])")


def printed(words: Sequence[str], given: str | None) -> str | None:
    """Return what a command prints, None if that is not known.

    Args:
        words: the command, expanded.
        given: what it reads, if that is known.
    """
    name, *rest = words
    if name == "echo":
        return _echo(rest)
    if name == "printf":
        return formatted(rest)
    if name == "cat":
        return None if given is None or rest not in ([], ["-"]) else f"{given}\n"
    if any(ATOM.search(word) for word in rest):
        return None
    match name, rest:
        case "basename", [path]:
            return os.path.basename(path.rstrip("/")) + "\n"
        case "basename", [path, suffix]:
            return os.path.basename(path).removesuffix(suffix) + "\n"
        case "dirname", [path]:
            return (os.path.dirname(path) or ".") + "\n"
        case "expr", [left, sign, right]:
            try:
                return f"{evaluated(f'{left} {sign} {right}')}\n"
            except Unknown:
                return None
    return None


def formatted(words: Sequence[str]) -> str | None:
    """Return what ``printf format arguments`` prints; None for conversions other than the usual."""
    words = list(words[1:] if words[:1] == ["--"] else words)
    if not words or re.sub(CONVERSION, "", words[0]).count("%"):
        return None
    form, arguments = unescaped(words[0]), words[1:]
    count = sum(match[1] != "%" for match in CONVERSION.finditer(form))
    texts = []
    while True:  # the format is used again while arguments are left
        values, arguments = arguments[:count], arguments[count:]
        text = _filled(form, values)
        if text is None:
            return None
        texts.append(text)
        if not arguments or not count:
            return "".join(texts)


def _filled(form: str, values: Sequence[str]) -> str | None:
    left = list(values)
    parts: list[str] = []
    end = 0
    for match in CONVERSION.finditer(form):
        parts.append(form[end : match.start()])
        end = match.end()
        if match[1] == "%":
            parts.append("%")
            continue
        kind, value = match[1][-1], left.pop(0) if left else ""
        if match[1] == kind and (kind == "s" or ATOM.search(value)):
            parts.append(value)
            continue
        try:
            known: str | float = value
            if kind != "s":
                known = float(value or "0") if kind in "fg" else int(value or "0")
            parts.append(match[0] % known)
        except ValueError:
            return None
    return "".join([*parts, form[end:]])


def _echo(words: Sequence[str]) -> str:
    rest = list(words)
    options = ""
    while rest and re.fullmatch(r"-[neE]+", rest[0]):
        options += rest.pop(0)
    text = " ".join(rest)
    return (unescaped(text) if "e" in options else text) + "\n" * ("n" not in options)
