"""The commands that a launch script would start, read without starting anything.

Assignments, conditions on known values, loops over known words and functions are followed. What is
not known is decided so that launches are found: commands succeed, a condition that hangs on a
command or a file is false, and a variable that nothing sets is empty in a condition.
"""

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron.core.utils import UserError
from megatron.training.shell_syntax import (
    Arithmetic,
    Case,
    For,
    Function,
    If,
    Node,
    Not,
    Sequence_,
    Simple,
    Test,
    While,
    parse,
)
from megatron.training.shell_words import (
    ATOM,
    Unknown,
    Variables,
    arithmetic,
    array,
    fields,
    joined,
)

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^]]*\])?(\+?)=(.*)", re.DOTALL)
DECLARING = ("export", "declare", "local", "readonly", "typeset")
SHELLS = ("bash", "sh", "zsh", "dash")
MOST_ROUNDS = 1000
MOST_DEPTH = 50
SBATCH = re.compile(r"^#SBATCH\b([^#\n]*)", re.MULTILINE)
SBATCH_OPTION = re.compile(r"(?<!\S)(--?[A-Za-z][\w-]*)[=\s]\s*([^\s-]\S*)")
SLURM_VARIABLES = {
    "--nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "-N": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "--ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "-n": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "--ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "--cpus-per-task": ("SLURM_CPUS_PER_TASK",),
    "-c": ("SLURM_CPUS_PER_TASK",),
    "--gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "--gres": ("SLURM_GPUS_ON_NODE",),
    "--job-name": ("SLURM_JOB_NAME",),
    "-J": ("SLURM_JOB_NAME",),
}


@dataclass(frozen=True)
class Command:
    """A command with its words expanded, and what was assigned for it alone."""

    words: tuple[str, ...]
    line: int
    environment: Mapping[str, str]


@dataclass
class Script:
    """What a script would start, and what had to be assumed."""

    commands: list[Command] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read(
    text: str,
    given: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
    folder: Path | None = None,
) -> Script:
    """Return the commands of a script.

    Args:
        text: the script.
        given: values of variables, which win over the script's own.
        arguments: the script's arguments.
        folder: where files that it sources are looked for.

    Raises:
        UserError: a quote, bracket or block is not closed.
    """
    reader = _Reader(Variables(given or {}, slurm(text)), folder)
    reader.variables.positional = list(arguments)
    reader.run(parse(text))
    names = list(reader.variables.assumed_empty)
    if names:
        reader.script.notes.append(
            f"taken as unset in conditions: {', '.join(names)} (--set NAME=VALUE says otherwise)"
        )
    reader.script.notes = list(dict.fromkeys(reader.script.notes))
    return reader.script


def slurm(text: str) -> dict[str, str]:
    """Return the variables that Slurm sets from a script's ``#SBATCH`` lines."""
    values: dict[str, str] = {}
    options = [pair for line in SBATCH.findall(text) for pair in SBATCH_OPTION.findall(line)]
    for option, value in options:
        number = value.rpartition(":")[2] if option in ("--gres", "--gpus-per-node") else value
        values |= dict.fromkeys(SLURM_VARIABLES.get(option, ()), number)
    return values


class _Reader:
    """Walks the tree; the status of a node is True, False, or None if it cannot be known."""

    def __init__(self, variables: Variables, folder: Path | None) -> None:
        self.variables = variables
        self.folder = folder
        self.script = Script()
        self.functions: dict[str, Node] = {}
        self.depth = 0

    def run(self, node: Node) -> bool | None:
        """Follow a node and return its status."""
        walk: Mapping[type, Callable[[Node], bool | None]] = {
            Simple: self._simple,
            Test: self._test_command,
            Arithmetic: self._arithmetic,
            Sequence_: self._sequence,
            Not: self._not,
            If: self._if,
            For: self._for,
            While: self._while,
            Case: self._case,
            Function: self._define,
        }
        return walk[type(node)](node)

    def _sequence(self, node: Node) -> bool | None:
        assert isinstance(node, Sequence_)
        status: bool | None = True
        for joint, part in node.parts:
            skipped = (joint == "&&" and status is False) or (joint == "||" and status is not False)
            if not skipped:
                status = self.run(part)
        return status

    def _not(self, node: Node) -> bool | None:
        assert isinstance(node, Not)
        status = self.run(node.body)
        return None if status is None else not status

    def _if(self, node: Node) -> bool | None:
        assert isinstance(node, If)
        for condition, body in node.branches:
            status = True if condition is None else self.run(condition)
            if status is None and _matters(body):
                shown = self.variables.show(_text(condition))
                self.script.notes.append(f"line {node.line}: taken as false: {shown}")
            if status:
                return self.run(body)
        return None

    def _for(self, node: Node) -> bool | None:
        assert isinstance(node, For)
        words = [word for raw in node.words for word in fields(raw, self.variables)]
        if not node.name:
            return self._counted(node)
        for word in words[:MOST_ROUNDS]:
            if word and self.variables.emptied(word) == "":
                continue  # a variable that nothing sets
            self.variables.set(node.name, word)
            self.run(node.body)
        return True

    def _counted(self, node: For) -> bool | None:
        """Follow ``for ((start; condition; step))``; once if it hangs on something unknown."""
        start, condition, step, *_ = [*node.words[0].split(";"), "", "", ""]
        self._let(start)
        for _ in range(MOST_ROUNDS):
            try:
                if not arithmetic(condition, self.variables):
                    return True
            except Unknown:
                self.run(node.body)
                return None
            self.run(node.body)
            self._let(step)
        return True

    def _while(self, node: Node) -> bool | None:
        assert isinstance(node, While)
        endless = isinstance(node.condition, Sequence_) and [
            part.words for _, part in node.condition.parts if isinstance(part, Simple)
        ] in ([["true"]], [[":"]])
        for _ in range(1 if endless else MOST_ROUNDS):
            if not self.run(node.condition):
                break
            self.run(node.body)
        return True

    def _case(self, node: Node) -> bool | None:
        assert isinstance(node, Case)
        text = self.variables.emptied(joined(node.word, self.variables))
        if text is None:
            self.script.notes.append(f"line {node.line}: only the default of the case is read")
        for patterns, body in node.branches:
            for raw in patterns:
                pattern = joined(raw, self.variables)
                if pattern == "*" or (text is not None and fnmatch.fnmatchcase(text, pattern)):
                    return self.run(body)
        return True

    def _define(self, node: Node) -> bool | None:
        assert isinstance(node, Function)
        self.functions[node.name] = node.body
        return True

    def _arithmetic(self, node: Node) -> bool | None:
        assert isinstance(node, Arithmetic)
        return self._let(node.text)

    def _let(self, text: str) -> bool | None:
        match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*(\+\+|--|[-+*/]?=(?!=))(.*)", text, re.DOTALL)
        try:
            if match is None:
                return bool(arithmetic(text, self.variables))
            name, sign, rest = match.groups()
            step = {"++": f"{name} + 1", "--": f"{name} - 1", "=": rest}
            value = arithmetic(step.get(sign, f"{name} {sign[0]} ({rest})"), self.variables)
        except Unknown:
            if match is not None:
                self.variables.set(match[1], self.variables.atom(f"$(({text.strip()}))"))
            return None
        self.variables.set(name, str(value))
        return bool(value)

    def _test_command(self, node: Node) -> bool | None:
        assert isinstance(node, Test)
        return self._condition([word for word in node.words if word != "\n"], patterns=True)

    def _simple(self, node: Node) -> bool | None:
        assert isinstance(node, Simple)
        raw = list(node.words)
        own: dict[str, str] = {}
        while raw and (match := ASSIGNMENT.fullmatch(raw[0])):
            raw.pop(0)
            if raw and not all(ASSIGNMENT.fullmatch(word) for word in raw):
                own[match[1]] = self.variables.show(joined(match[4], self.variables))
            else:
                self._assign(match)
        if not raw:
            return True
        if raw[0] in DECLARING:
            for word in raw[1:]:
                if match := ASSIGNMENT.fullmatch(word):
                    self._assign(match)
            return True
        if raw[0] in ("[", "test"):
            return self._condition(raw[1 : -1 if raw[0] == "[" else None], patterns=False)
        words = [word for item in raw for word in fields(item, self.variables)]
        return self._command(words, node, own) if words else True

    def _command(self, words: list[str], node: Simple, own: Mapping[str, str]) -> bool | None:
        name, rest = words[0], words[1:]
        if name in ("true", ":", "false"):
            return name != "false"
        if name in self.functions:
            return self._call(self.functions[name], rest)
        if name == "eval":
            return self._nested(" ".join(rest), node.line)
        if name in ("source", "."):
            return self._source(rest)
        if name in ("shift", "unset", "set", "let", "read"):
            return self._builtin(name, rest)
        inner = self._inner_script(words) or (node.here if self._reads_script(words) else "")
        before = len(self.script.commands)
        if inner:
            self._nested(inner, node.line)
        if len(self.script.commands) == before:
            shown = tuple(self.variables.show(word) for word in words)
            self.script.commands.append(Command(shown, node.line, own))
        else:
            self._wrap(before, words, inner, own)
        return None

    def _builtin(self, name: str, words: list[str]) -> bool | None:
        variables = self.variables
        if name == "shift":
            count = int(words[0]) if words and words[0].isdigit() else 1
            variables.positional = variables.positional[count:]
        elif name == "unset":
            for word in words:
                variables.unset(word)
        elif name == "set" and "--" in words:
            variables.positional = words[words.index("--") + 1 :]
        elif name == "let":
            return self._let(" ".join(words))
        elif name == "read":
            for word in words:
                if re.fullmatch(r"[A-Za-z_]\w*", word):
                    variables.set(word, variables.atom(f"${word}"))
        return True

    def _assign(self, match: re.Match[str]) -> None:
        name, index, more, raw = match.groups()
        variables = self.variables
        if index is not None:
            return  # elements of arrays one by one do not occur in launches
        if raw.startswith("(") and raw.endswith(")"):
            items = array(raw, variables)
            old = variables.get(name) if more else []
            variables.set(name, [*([old] if isinstance(old, str) else old or []), *items])
            return
        if variables.get(name) is None and re.match(rf'"?\s*\${{?{name}}}?\s', raw):
            variables.set(name, "")  # ARGS="$ARGS --more" starts from nothing
        text = joined(raw, variables)
        old = variables.get(name) if more else None
        if isinstance(old, list):
            text = (old[0] if old else "") + text
            variables.set(name, [text, *old[1:]])
        else:
            variables.set(name, (old or "") + text)

    def _call(self, body: Node, arguments: list[str]) -> bool | None:
        if self.depth >= MOST_DEPTH:
            return None
        saved, self.variables.positional = self.variables.positional, arguments
        self.depth += 1
        status = self.run(body)
        self.depth -= 1
        self.variables.positional = saved
        return status

    def _nested(self, text: str, line: int) -> bool | None:
        """Read a text as a script of its own, with the variables of this one."""
        if self.depth >= MOST_DEPTH:
            return None
        self.depth += 1
        before = len(self.script.commands)
        try:
            self.run(parse(text))
        except UserError as error:
            self.script.notes.append(f"line {line}: a text that is run cannot be read: {error}")
        self.depth -= 1
        found = self.script.commands
        found[before:] = [Command(c.words, line, c.environment) for c in found[before:]]
        return None

    def _inner_script(self, words: Sequence[str]) -> str:
        """Return the script that a shell is started with, as in ``srun bash -c '...'``."""
        for place, word in enumerate(words[:-1]):
            is_shell = place > 0 and words[place - 1].rpartition("/")[2] in SHELLS
            if re.fullmatch(r"-[a-z]*c", word) and (is_shell or words[place - 1].startswith("-")):
                return words[place + 1]
        return ""

    def _reads_script(self, words: Sequence[str]) -> bool:
        return words[0].rpartition("/")[2] in (*SHELLS, "sbatch") or words[-1] in SHELLS

    def _wrap(self, before: int, words: list[str], inner: str, own: Mapping[str, str]) -> None:
        """Put what starts an inner script before the words of its commands."""
        outer = words[: words.index(inner)] if inner in words else words
        outer = [word for word in outer if word.rpartition("/")[2] not in SHELLS]
        prefix = tuple(self.variables.show(word) for word in outer if word != "-c")
        found = self.script.commands
        found[before:] = [
            Command((*prefix, *c.words), c.line, {**own, **c.environment}) for c in found[before:]
        ]

    def _source(self, words: Sequence[str]) -> bool | None:
        path = words[0] if words else ""
        place = (self.folder or Path()) / path
        if not path or ATOM.search(path) or not place.is_file():
            self.script.notes.append(f"not read: source {self.variables.show(path)}")
            return None
        return self._nested(place.read_text(encoding="utf-8", errors="replace"), 0)

    def _condition(self, raw: Sequence[str], patterns: bool) -> bool | None:
        """Return the value of a test, None if it hangs on something unknown."""
        for joint, whole in (("||", any), ("-o", any), ("&&", all), ("-a", all)):
            if joint in raw:
                at = list(raw).index(joint)
                parts = [self._condition(p, patterns) for p in (raw[:at], raw[at + 1 :])]
                decisive = whole is any
                if decisive in parts:
                    return decisive
                return None if None in parts else not decisive
        if raw and raw[0] == "!":
            status = self._condition(raw[1:], patterns)
            return None if status is None else not status
        if raw and raw[0] == "(" and raw[-1] == ")":
            return self._condition(raw[1:-1], patterns)
        if len(raw) == 2 and raw[0].startswith("-") and raw[0] not in ("-z", "-n"):
            return None  # a question about a file
        words = [self.variables.emptied(joined(word, self.variables)) for word in raw]
        if any(word is None for word in words):
            return None
        return _test([word for word in words if word is not None], patterns)


def _matters(node: Node) -> bool:
    """Return whether a branch could change a launch: it assigns, or runs something."""
    match node:
        case Simple():
            return any(ASSIGNMENT.match(word) or ".py" in word for word in node.words)
        case Sequence_():
            return any(_matters(part) for _, part in node.parts)
        case Not() | For() | While():
            return _matters(node.body)
        case If() | Case():
            return any(_matters(body) for _, body in node.branches)
    return False


def _text(node: Node | None) -> str:
    """Return a condition about as it was written."""
    match node:
        case Simple() | Test():
            return " ".join(node.words)
        case Not():
            return f"! {_text(node.body)}"
        case Arithmetic():
            return f"(({node.text}))"
        case Sequence_():
            return "".join(
                f" {joint} " * (i > 0) + _text(p) for i, (joint, p) in enumerate(node.parts)
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
