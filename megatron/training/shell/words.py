"""Words of a launch script with their variables filled in, as far as they are known.

What is not known (a variable that the script takes from its environment, the output of a command)
stays as one atom, which no splitting tears apart and `Variables.show` writes as the script does:
``$NAME``, ``$(command)``, ``$((A * B))``. A variable that nothing sets is told apart from one that
a command, a file or the keyboard sets: only the former is nothing.
"""

import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megatron.training.shell.arithmetic import UNKNOWN, Unknown, evaluated
from megatron.training.shell.syntax import closing, tokens

Value = str | list[str] | dict[str, str]
OPEN, CLOSE = "\ue000", "\ue001"
ATOM = re.compile(f"{OPEN}(\\d+){CLOSE}")
NAME = re.compile(r"[A-Za-z_]\w*|\d|[@*#?$!-]")
INDIRECT = re.compile(r"!([A-Za-z_]\w*)(\[[@*]\])?")
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"'}
PARAMETER = re.compile(
    r"(?P<length>#?)(?P<name>[A-Za-z_]\w*|\d+|[@*#?$!-])(?:\[(?P<index>[^]]*)\])?"
)


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
        self.unknown: dict[str, str] = {}
        """What something unread sets, variables and ``$(command)``, and by what name to give it."""
        self.may_be_set: set[str] = set()
        """Variables that a branch sets of which nobody knows whether it is taken."""
        self.anything_may_be_set = False
        """A file or a command that cannot be read may have set any variable."""
        self.assigned: Counter[str] = Counter()
        """How often the script assigns each variable."""
        self.output: Callable[[str], str | None] = lambda _: None
        """Returns what a command substitution prints, None if that is not known."""

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

    def set(self, name: str, value: Value, *, appends: bool = False) -> None:
        """Assign, unless the user gave the value.

        What the user gives stands in for what the script does not set, so that it may be added to.
        """
        if name not in self.fixed or (appends and not self.assigned[name]):
            self._values[name] = value

    def set_unknown(self, name: str, *, is_array: bool = False) -> None:
        """Assign what is not known, unless the user gave the value."""
        if name not in self.fixed:
            atom = self.atom(f"${name}")
            self._values[name] = [atom] if is_array else atom
            self.unknown[name] = name

    def absent(self, name: str, source: str) -> str:
        """Return the atom of a variable without a value; one that nothing sets is nothing."""
        if self.anything_may_be_set or name in self.may_be_set:
            self.unknown[name] = name
        return self.atom(source)

    def saved(self) -> Mapping[str, Any]:
        """Return what a subshell cannot change; `restore` takes it back."""
        return {
            "_values": dict(self._values),
            "assigned": self.assigned.copy(),
            "unknown": dict(self.unknown),
            "positional": self.positional,
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Forget what a subshell did."""
        self.__dict__.update(saved)

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
            if not re.fullmatch(r"\$\w+", source) or source[1:] in self.unknown:
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


def pattern(raw: str, variables: Variables) -> str:
    """Return a word as a pattern of `fnmatch`, where quoted characters stand for themselves."""
    return "".join(
        re.sub(r"([*?[])", r"[\1]", text) if quoted else text
        for text, quoted in _pieces(raw, variables)
    )


def document(text: str, variables: Variables) -> str:
    """Return the text of a here-document."""
    return "".join(part.replace("\0", " ") for part, _ in _in_quotes(text, variables))


def unescaped(text: str) -> str:
    """Return a text as ``$'...'``, ``echo -e`` and ``printf`` read it."""
    return re.sub(r"\\([ntr\\'\"])", lambda match: ESCAPES[match[1]], text)


def table(raw: str, variables: Variables) -> dict[str, str]:
    """Return the elements of ``([key]=value ...)``."""
    found = {}
    for token in tokens(raw[1:-1]):
        if match := re.fullmatch(r"\[(.*?)\]=(.*)", token.text, re.DOTALL):
            found[joined(match[1], variables)] = joined(match[2], variables)
    return found


def arithmetic(text: str, variables: Variables) -> int:
    """Return the value of an arithmetic expression.

    Raises:
        Unknown: a variable is not known, or the expression is not understood.
    """
    filled = joined(f'"{text}"', variables) if "$" in text else text

    def value(match: re.Match[str]) -> str:
        known = variables.get(match[0])
        return str(known) if isinstance(known, str) and known else UNKNOWN

    filled = re.sub(r"(?<![\w#])[A-Za-z_]\w*", value, ATOM.sub(UNKNOWN, filled))
    return evaluated(filled)


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
            start = at
            value, at = _expansion(text, at, variables)
            if isinstance(value, list) and re.match(r"\$(\*|\{(\*|\w+\[\*))", text[start:at]):
                between = variables.get("IFS")
                yield (between[:1] if isinstance(between, str) else " ").join(value), "quoted"
            elif isinstance(value, list):
                yield "\0".join(value), "several"
            else:
                yield value, "quoted"
        else:
            end = at + 1
            while end < len(text) and text[end] not in "\\$`":
                end += 1
            yield text[at:end], "quoted"
            at = end


def _expansion(text: str, at: int, variables: Variables) -> tuple[str | list[str], int]:
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
        return unescaped(text[at + 2 : end]), end + 1
    match = NAME.match(text, at + 1)
    if match is None:
        return "$", at + 1
    return _value(match[0], variables), match.end()


def _value(name: str, variables: Variables) -> str | list[str]:
    value = variables.get(name)
    if value is None:
        return variables.absent(name, f"${name}")
    if isinstance(value, list) and name in "@*":
        return value
    return _first(value)


def _first(value: Value) -> str:
    """Return what an array is where one value is asked for."""
    if isinstance(value, dict):
        return value.get("0", "")
    return value if isinstance(value, str) else (value[0] if value else "")


def _parameter(inside: str, variables: Variables) -> str | list[str]:
    """Return the value of ``${inside}``."""
    source = f"${{{inside}}}"
    if indirect := INDIRECT.fullmatch(inside):
        return _indirect(indirect[1], bool(indirect[2]), source, variables)
    match = PARAMETER.match(inside)
    if match is None:
        return variables.atom(source)
    name, rest = match["name"], inside[match.end() :]
    value = _chosen(name, match["index"], variables)
    if match["length"] and value is not None:
        return variables.atom(source) if ATOM.search("".join(value)) else str(len(value))
    if rest[:1] in (":", "-", "+", "=", "?") and not re.match(r":(?![-+=?])", rest):
        return _default(name, value, rest, source, variables)
    if value is None:
        return variables.absent(name, f"${name}" if not rest else source)
    if not rest:
        return value
    if isinstance(value, list) and rest[0] == ":":
        part = _slice(value, rest, name in "@*", variables)
        return variables.atom(source) if part is None else part
    changed = [
        _changed(item, rest, variables) for item in ([value] if isinstance(value, str) else value)
    ]
    if any(item is None for item in changed):
        return variables.atom(source)
    known = [item for item in changed if item is not None]
    return known[0] if isinstance(value, str) else known


def _chosen(name: str, index: str | None, variables: Variables) -> str | list[str] | None:
    """Return the value, or the elements, that ``name`` or ``name[index]`` means."""
    found = variables.get(name)
    if found is None or (isinstance(found, list) and name in "@*"):
        return found
    return _first(found) if index is None else _element(name, found, index, variables)


def _indirect(name: str, is_array: bool, source: str, variables: Variables) -> str | list[str]:
    """Return ``${!name}``, the value of the variable that is named, or an array's keys."""
    value = variables.get(name)
    if is_array and isinstance(value, list | dict):
        return list(value) if isinstance(value, dict) else list(map(str, range(len(value))))
    if not isinstance(value, str) or is_array or not re.fullmatch(r"[A-Za-z_]\w*", value):
        return variables.absent(name, source)
    return _value(value, variables)


def _slice(
    items: list[str], rest: str, is_positional: bool, variables: Variables
) -> list[str] | None:
    """Return ``${items[@]:offset:length}``; None if the numbers are not known."""
    try:
        start, *length = [arithmetic(part, variables) for part in rest[1:].split(":")]
    except Unknown:
        return None
    if is_positional:
        items = ["bash", *items]  # the name of the script is the one before the first
    return items[start:][: length[0]] if length else items[start:]


def _element(name: str, value: Value, index: str, variables: Variables) -> str | list[str] | None:
    if isinstance(value, dict):
        if index in ("@", "*"):
            return list(value.values())
        return value.get(joined(index, variables))
    items = [value] if isinstance(value, str) else value
    if isinstance(value, str) and name in variables.fixed:
        items = value.split()  # given as text
    if index in ("@", "*"):
        return items
    try:
        return items[arithmetic(index, variables)]
    except (Unknown, IndexError):
        return None


def _default(
    name: str, value: str | list[str] | None, rest: str, source: str, variables: Variables
) -> str | list[str]:
    """Return ``${name:-word}`` and its relatives."""
    needs_text = rest.startswith(":")
    action, word = rest[needs_text : needs_text + 1], rest[needs_text + 1 :]
    present = value is not None and not (needs_text and value in ("", []))
    if value is None and (action in "?+" or not word):
        atom = variables.absent(name, f"${name}" if action == "?" else source)
        if action == "?" or name in variables.unknown:
            return atom
    if action == "+":
        return joined(word, variables) if present else ""
    if present:
        assert value is not None
        return value
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
    """Return the output of a command: the user's, else what it would print, else an atom."""
    source = f"$({' '.join(text.split())})"
    given = variables.fixed.get(source, variables.fixed.get(source[2:-1]))
    if given is not None:
        return given
    printed = variables.output(text)
    return variables.atom(source) if printed is None else printed
