"""Words of a launch script with their variables filled in, as far as they are known.

What is not known (a variable that the script takes from its environment, the output of a command)
stays as one atom, which no splitting tears apart and `Variables.show` writes as the script does:
``$NAME``, ``$(command)``, ``$((A * B))``.
"""

import ast
import fnmatch
import operator
import os.path
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from megatron.core.utils import UserError
from megatron.training.shell_syntax import closing, tokens

Value = str | list[str]
OPEN, CLOSE = "\ue000", "\ue001"
ATOM = re.compile(f"{OPEN}(\\d+){CLOSE}")
NAME = re.compile(r"[A-Za-z_]\w*|\d|[@*#?$!-]")
PARAMETER = re.compile(
    r"(?P<length>#?)(?P<name>[A-Za-z_]\w*|\d+|[@*#?$!-])(?:\[(?P<index>[^]]*)\])?"
)
BINARY: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda a, b: int(a / b) if abs(a) < 2**52 else a // b,
    ast.Mod: lambda a, b: a - b * int(a / b),
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}
COMPARE: Mapping[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class Unknown(Exception):
    """A value hangs on something that is not known."""


class Variables:
    """Variables and positional parameters of a script, and the atoms that stand for the rest."""

    def __init__(self, fixed: Mapping[str, str], defaults: Mapping[str, str]) -> None:
        self.fixed = dict(fixed)
        """Given by the user; assignments in the script do not change them."""
        self._values: dict[str, Value] = {**defaults, **fixed}
        self._atoms: list[str] = []
        self.positional: list[str] = []
        self.assumed_empty: dict[str, None] = {}
        """Unset variables that a condition asked about."""

    def get(self, name: str) -> Value | None:
        """Return a variable's value, None if nothing sets it."""
        if name in "@*":
            return self.positional
        if name == "#":
            return str(len(self.positional))
        if name.isdigit() and name not in self.fixed:
            known = self.positional
            return known[int(name) - 1] if 0 < int(name) <= len(known) else None
        return self._values.get(name)

    def set(self, name: str, value: Value) -> None:
        """Assign, unless the user gave the value."""
        if name not in self.fixed:
            self._values[name] = value

    def unset(self, name: str) -> None:
        """Forget a variable, unless the user gave it."""
        if name not in self.fixed:
            self._values.pop(name, None)

    def atom(self, source: str) -> str:
        """Return what stands for something unknown, written as in the script."""
        if source not in self._atoms:
            self._atoms.append(source)
        return f"{OPEN}{self._atoms.index(source)}{CLOSE}"

    def show(self, text: str) -> str:
        """Return a text with its atoms written out."""
        return ATOM.sub(lambda match: self._atoms[int(match[1])], text)

    def emptied(self, text: str) -> str | None:
        """Return a text for a condition: unset variables are empty; None if more is unknown."""
        for number in ATOM.findall(text):
            source = self._atoms[int(number)]
            if not re.fullmatch(r"\$\w+", source):
                return None
            self.assumed_empty[source] = None
        return ATOM.sub("", text)


def fields(raw: str, variables: Variables) -> list[str]:
    """Return the words that a word of a script becomes."""
    parts = list(_pieces(raw, variables))
    words: list[str] = []
    current: str | None = None
    for text, quoted in parts:
        if quoted == "several":
            first, *rest = text.split("\0") if text else [""]
            current = (current or "") + first if text else current
            for item in rest:
                words.append(current or "")
                current = item
        elif quoted:
            current = (current or "") + text
        else:
            if text[:1].isspace() and current is not None:
                words.append(current)
                current = None
            chunks = text.split()
            for place, chunk in enumerate(chunks):
                if place:
                    words.append(current or "")
                    current = None
                current = (current or "") + chunk
            if chunks and text[-1:].isspace() and current is not None:
                words.append(current)
                current = None
    return words if current is None else [*words, current]


def joined(raw: str, variables: Variables) -> str:
    """Return a word's text without splitting it, as in an assignment."""
    return "".join(text.replace("\0", " ") for text, _ in _pieces(raw, variables))


def array(raw: str, variables: Variables) -> list[str]:
    """Return the elements of ``( ... )``."""
    found = []
    for token in tokens(raw[1:-1]):
        if token.kind == "word":
            found += fields(token.text, variables)
    return found


def arithmetic(text: str, variables: Variables) -> int:
    """Return the value of an arithmetic expression.

    Raises:
        Unknown: a variable is not known, or the expression is not understood.
    """
    filled = joined(f'"{text}"', variables) if "$" in text else text

    def value(match: re.Match[str]) -> str:
        known = variables.get(match[0])
        return str(known) if isinstance(known, str) and known else "?"

    filled = re.sub(r"(?<![\w])[A-Za-z_]\w*", value, filled)
    filled = filled.replace("&&", " and ").replace("||", " or ")
    filled = re.sub(r"!(?!=)", " not ", re.sub(r"(?<!/)/(?!/)", "//", filled))
    filled = re.sub(r"\b0+(?=\d)", "", filled)
    try:
        return _evaluated(ast.parse(filled.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, ValueError) as error:
        raise Unknown(text) from error


def _evaluated(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        return BINARY[type(node.op)](_evaluated(node.left), _evaluated(node.right))
    if isinstance(node, ast.UnaryOp):
        inner = _evaluated(node.operand)
        signs = {ast.Not: int(not inner), ast.USub: -inner, ast.UAdd: inner, ast.Invert: ~inner}
        return signs[type(node.op)]
    if isinstance(node, ast.BoolOp):
        values = [bool(_evaluated(value)) for value in node.values]
        return int(all(values) if isinstance(node.op, ast.And) else any(values))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARE:
        right = _evaluated(node.comparators[0])
        return int(COMPARE[type(node.ops[0])](_evaluated(node.left), right))
    raise Unknown(ast.dump(node))


def _pieces(raw: str, variables: Variables) -> Iterator[tuple[str, str]]:
    """Yield (text, how it is quoted).

    What has ``""`` is split; what is ``"quoted"`` is not; ``"several"`` are words of their own,
    with NUL between them.
    """
    at = 0
    while at < len(raw):
        character = raw[at]
        if character == "\\":
            yield raw[at + 1 : at + 2], "quoted"
            at += 2
        elif character == "'":
            end = closing(raw, at)
            yield raw[at + 1 : end], "quoted"
            at = end + 1
        elif character == '"':
            end = closing(raw, at)
            inside = list(_in_quotes(raw[at + 1 : end], variables))
            if inside != [("", "several")]:  # "$@" of nothing is no word, but "" is one
                yield "", "quoted"
                yield from inside
            at = end + 1
        elif character in "$`":
            value, at = _expansion(raw, at, variables)
            if isinstance(value, list):
                yield " ".join(value), ""
            else:
                yield value, ""
        else:
            end = at + 1
            while end < len(raw) and raw[end] not in "\\'\"$`":
                end += 1
            yield raw[at:end], ""  # a script's own blanks are outside its words
            at = end


def _in_quotes(text: str, variables: Variables) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(text):
        if text[at] == "\\" and text[at + 1 : at + 2] in ("$", "`", '"', "\\", "\n"):
            yield text[at + 1 : at + 2].strip("\n"), "quoted"
            at += 2
        elif text[at] in "$`":
            value, at = _expansion(text, at, variables)
            if isinstance(value, list):
                yield "\0".join(value), "several"
            else:
                yield value, "quoted"
        else:
            end = at + 1
            while end < len(text) and text[end] not in "\\$`":
                end += 1
            yield text[at:end], "quoted"
            at = end


def _expansion(text: str, at: int, variables: Variables) -> tuple[Value, int]:
    """Return the value of the expansion at ``at``, and where it ends."""
    if text[at] == "`":
        end = closing(text, at)
        return _command(text[at + 1 : end].replace("\\`", "`"), variables), end + 1
    if text.startswith("$((", at):
        end = closing(text, at + 1)
        inside = text[at + 3 : end - 1]
        try:
            return str(arithmetic(inside, variables)), end + 1
        except Unknown:
            shown = variables.show(joined(f'"{inside}"', variables)).strip()
            return variables.atom(f"$(({shown}))"), end + 1
    if text.startswith("$(", at):
        end = closing(text, at + 1)
        return _command(text[at + 2 : end], variables), end + 1
    if text.startswith("${", at):
        end = closing(text, at + 1)
        return _parameter(text[at + 2 : end], variables), end + 1
    if text.startswith("$'", at):
        end = closing(text, at + 1)
        return text[at + 2 : end], end + 1
    match = NAME.match(text, at + 1)
    if match is None:
        return "$", at + 1
    return _value(match[0], variables), match.end()


def _value(name: str, variables: Variables) -> Value:
    value = variables.get(name)
    if value is None:
        return variables.atom(f"${name}")
    if isinstance(value, list) and name not in "@*":
        return value[0] if value else ""
    return value


def _parameter(inside: str, variables: Variables) -> Value:
    """Return the value of ``${inside}``."""
    source = f"${{{inside}}}"
    match = PARAMETER.match(inside)
    if match is None:
        return variables.atom(source)
    name, rest = match["name"], inside[match.end() :]
    value = variables.get(name)
    if match["index"] is not None:
        value = _element(value, match["index"], variables)
    elif isinstance(value, list) and name not in "@*":
        value = value[0] if value else ""
    if match["length"] and value is not None:
        return str(len(value))
    if rest[:1] in (":", "-", "+", "=", "?") and not re.match(r":\s*[\d$(]", rest):
        return _default(name, value, rest, variables)
    if value is None:
        return variables.atom(f"${name}" if not rest else source)
    if not rest:
        return value
    changed = [
        _changed(item, rest, variables) for item in ([value] if isinstance(value, str) else value)
    ]
    if any(item is None for item in changed):
        return variables.atom(source)
    known = [item for item in changed if item is not None]
    return known[0] if isinstance(value, str) else known


def _element(value: Value | None, index: str, variables: Variables) -> Value | None:
    if value is None:
        return None
    items = [value] if isinstance(value, str) else value
    if index in ("@", "*"):
        return items
    try:
        return items[arithmetic(index, variables)]
    except (Unknown, IndexError):
        return None


def _default(name: str, value: Value | None, rest: str, variables: Variables) -> Value:
    """Return ``${name:-word}`` and its relatives."""
    needs_text = rest.startswith(":")
    action, word = rest[needs_text : needs_text + 1], rest[needs_text + 1 :]
    present = value is not None and not (needs_text and value in ("", []))
    if action == "+":
        return joined(word, variables) if present else ""
    if present:
        assert value is not None
        return value
    if action == "?":
        return variables.atom(f"${name}")
    text = joined(word, variables)
    if action == "=":
        variables.set(name, text)
    return text


def _changed(value: str, rest: str, variables: Variables) -> str | None:
    """Return a value after ``%``, ``#``, ``/``, ``^``, ``,`` or ``:offset``; None if unknown."""
    if ATOM.search(value):
        return None
    if rest[0] in "^,":
        change = str.upper if rest[0] == "^" else str.lower
        return change(value) if rest[1:2] == rest[0] else change(value[:1]) + value[1:]
    if rest[0] in "%#":
        greedy = rest[1:2] == rest[0]
        pattern = joined(rest[1 + greedy :], variables)
        return _trimmed(value, pattern, rest[0], greedy)
    if rest[0] == "/":
        every = rest[1:2] == "/"
        old, _, new = rest[1 + every :].partition("/")
        regex = fnmatch.translate(joined(old, variables)).removesuffix("\\Z")
        return re.sub(regex, lambda _: joined(new, variables), value, count=0 if every else 1)
    if rest[0] == ":":
        try:
            start, *length = [arithmetic(part, variables) for part in rest[1:].split(":")]
        except Unknown:
            return None
        return value[start:][: length[0]] if length else value[start:]
    return None


def _trimmed(value: str, pattern: str, side: str, greedy: bool) -> str:
    cuts: Sequence[int] = range(len(value) + 1)
    if (side == "%") != greedy:
        cuts = cuts[::-1]
    for cut in cuts:
        part = value[cut:] if side == "%" else value[:cut]
        if fnmatch.fnmatchcase(part, pattern):
            return value[:cut] if side == "%" else value[cut:]
    return value


def _command(text: str, variables: Variables) -> str:
    """Return the output of a command that only works on text, an atom for any other."""
    source = variables.atom(f"$({' '.join(text.split())})")
    try:
        found = list(tokens(text))[:-1]
    except UserError:
        return source
    if not found or any(token.kind != "word" for token in found):
        return source
    words = [word for token in found for word in fields(token.text, variables)]
    if any(ATOM.search(word) for word in words):
        return source
    match words:
        case ["echo", *rest]:
            return " ".join(word for word in rest if word not in ("-n", "-e"))
        case ["basename", path]:
            return os.path.basename(path.rstrip("/"))
        case ["basename", path, suffix]:
            return os.path.basename(path).removesuffix(suffix)
        case ["dirname", path]:
            return os.path.dirname(path) or "."
        case ["expr", left, sign, right]:
            try:
                return str(arithmetic(f"{left} {sign} {right}", variables))
            except Unknown:
                return source
    return source
