"""Commands of bash that set variables: read, mapfile, getopts, printf -v, shift, set, unset.

What they set is known if they take it from the script itself (a here-document, ``<<<``, its
arguments); from a file or a command it is not, and a launch that uses it asks for it by name.
"""

import re
from collections.abc import Mapping, Sequence

from megatron.training.shell.arithmetic import Unknown
from megatron.training.shell.output import formatted
from megatron.training.shell.words import ATOM, Variables, arithmetic

NAME = re.compile(r"[A-Za-z_]\w*")
ELEMENT = re.compile(r"([A-Za-z_]\w*)\[(.+)\]")
WITH_VALUE = {"read": "adintNpu", "mapfile": "dnOsuCc"}
"""Letters of options that take a value."""


class Builtins:
    """The commands, with what they read on where they are."""

    names = ("read", "mapfile", "readarray", "getopts", "shift", "unset", "set")

    def __init__(self, variables: Variables) -> None:
        self.variables = variables
        self.lines: list[str] | None = None
        """What is left of what the loop around reads; None if that is not known."""
        self._letters = 0
        """Where getopts is in a word of several letters; 0 for a new word."""

    def run(
        self, words: Sequence[str], given: str | None, own: Mapping[str, str], *, reads: bool
    ) -> bool | None:
        """Run one of them and return its status, None if that is not known.

        Args:
            words: the command.
            given: what it reads, if that is known.
            own: variables that are set for it alone.
            reads: it has an input of its own, known or not.
        """
        name, rest = words[0], list(words[1:])
        if name == "read":
            return self._read(rest, given, own, reads=reads)
        if name in ("mapfile", "readarray"):
            return self._mapfile(rest, given)
        if name == "getopts":
            return self._getopts(rest)
        if name == "shift":
            count = int(rest[0]) if rest and rest[0].isdigit() else 1
            self.variables.positional = self.variables.positional[count:]
        elif name == "unset":
            for word in rest:
                self._unset(word)
        elif "--" in rest:
            self.variables.positional = rest[rest.index("--") + 1 :]
        return True

    def printf(self, words: Sequence[str]) -> None:
        """Run ``printf -v NAME format arguments``."""
        text = formatted(words[3:])
        if text is None:
            self.variables.set_unknown(words[2])
        else:
            self.variables.set(words[2], text)

    def _unset(self, word: str) -> None:
        element = ELEMENT.fullmatch(word)
        if element is None:
            self.variables.unset(word)
            return
        value = self.variables.get(element[1])
        if isinstance(value, dict):
            value = {key: item for key, item in value.items() if key != element[2]}
        elif isinstance(value, list):
            try:
                value = list(value)
                del value[arithmetic(element[2], self.variables)]
            except (Unknown, IndexError):
                return
        if value is not None:
            self.variables.set(element[1], value)

    def _read(
        self, words: Sequence[str], given: str | None, own: Mapping[str, str], *, reads: bool
    ) -> bool | None:
        options, names = _options("read", words)
        array = options.get("a")
        names = [array] if array else ([n for n in names if NAME.fullmatch(n)] or ["REPLY"])
        more = True
        if reads:
            delimiter = options.get("d", "\n")
            text, found, _ = (given or "").partition(delimiter) if delimiter else (given, "", "")
            more = bool(found) or delimiter == "\n"
            line = None if given is None else text
        elif self.lines is not None:
            more = bool(self.lines)
            line = self.lines.pop(0) if self.lines else ""
        else:
            line = None
        if line is None:
            for name in names:
                self.variables.set_unknown(name, is_array=bool(array))
            return None
        between = own.get("IFS", self.variables.get("IFS"))
        between = between if isinstance(between, str) else " \t\n"
        if array:
            self.variables.set(array, _split(line, between))
            return more
        values = _split(line, between, len(names))
        for place, name in enumerate(names):
            self.variables.set(name, values[place] if place < len(values) else "")
        return more

    def _mapfile(self, words: Sequence[str], given: str | None) -> bool | None:
        _, names = _options("mapfile", words)
        name = names[0] if names else "MAPFILE"
        if given is None:
            self.variables.set_unknown(name, is_array=True)
            return None
        self.variables.set(name, given.split("\n"))
        return True

    def _getopts(self, words: Sequence[str]) -> bool | None:
        """Take the next option of the arguments, as bash does."""
        variables = self.variables
        if len(words) < 2:
            return None
        letters, name, *arguments = words
        arguments = arguments or variables.positional
        given = variables.get("OPTIND")
        place = int(given) if isinstance(given, str) and given.isdigit() else 1
        word = arguments[place - 1] if 0 < place <= len(arguments) else ""
        if ATOM.search(word):
            variables.set_unknown(name)
            variables.set_unknown("OPTARG")
            return None
        if not self._letters and (word[:1] != "-" or word in ("-", "--")):
            variables.set(name, "?")
            variables.set("OPTIND", str(place + (word == "--")))
            return False
        at = self._letters or 1
        letter, rest = word[at], word[at + 1 :]
        self._letters = 0
        variables.set("OPTARG", "")
        if letter == ":" or letter not in letters:
            found = "?"
        elif f"{letter}:" not in letters:
            found = letter
        elif rest or place < len(arguments):
            found = letter
            variables.set("OPTARG", rest or arguments[place])
            place, rest = place + (not rest), ""
        else:
            found = ":" if letters.startswith(":") else "?"
        if rest:
            self._letters = at + 1
        else:
            place += 1
        variables.set(name, found)
        variables.set("OPTIND", str(place))
        return True


def _options(name: str, words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the options that take a value, and the words behind the options."""
    found: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        for at, letter in enumerate(word[1:], 1):
            if letter in WITH_VALUE[name]:
                found[letter] = word[at + 1 :] or (rest.pop(0) if rest else "")
                break
    return found, rest


def _split(line: str, separators: str, most: int = 0) -> list[str]:
    """Return the words of a line, or at most so many, the last with the rest of the line."""
    if not separators:
        return [line]
    if separators.isspace():
        return [part.rstrip() for part in line.split(None, most - 1 if most else -1)]
    if most == 1:
        return [line]
    return re.split(f"[{re.escape(separators)}]", line, maxsplit=max(most - 1, 0))
