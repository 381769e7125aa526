"""The commands that a launch script would start, read without starting anything.

Assignments, conditions on known values, loops over known words and functions are followed. What is
not known is decided so that launches are found: commands succeed, a condition that hangs on a
command or a file is false, and a variable that nothing sets is empty in a condition. What only an
undecided branch sets, and what comes from a file or a command, stays unknown.
"""

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron.core.utils import UserError
from megatron.training.shell.arithmetic import Unknown
from megatron.training.shell.assignments import Assignments
from megatron.training.shell.builtins import Builtins
from megatron.training.shell.conditions import (
    ASSIGNMENT,
    as_text,
    assigned_names,
    condition,
    matters,
    reads_input,
)
from megatron.training.shell.launch_command import SHELLS, inner_script
from megatron.training.shell.output import PRINTING, printed
from megatron.training.shell.syntax import (
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
    Token,
    While,
    parse,
    too_deep,
)
from megatron.training.shell.words import (
    ATOM,
    Variables,
    arithmetic,
    document,
    fields,
    joined,
    pattern,
)

DECLARING = ("export", "declare", "local", "readonly", "typeset")
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
    unknown: Mapping[str, str] = field(default_factory=dict)
    """Variables and ``$(command)`` that something unread sets, with the name to give each by."""


@dataclass
class _Printed:
    """What a command substitution has printed so far."""

    texts: list[str] = field(default_factory=list)
    is_certain: bool = True


class _Returned(Exception):
    """A function, or a command substitution, has come to its end."""


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
        UserError: a quote, bracket or block is not closed, or too many are within each other.
    """
    reader = _Reader(Variables(given or {}, slurm(text)), folder)
    reader.variables.positional = list(arguments)
    tree = parse(text)
    try:
        reader.run(tree)
    except RecursionError:
        raise too_deep(reader.line) from None
    names = list(reader.variables.assumed_empty)
    if names:
        reader.script.notes.append(
            f"taken as unset in conditions: {', '.join(names)} (--set NAME=VALUE says otherwise)"
        )
    reader.script.notes = list(dict.fromkeys(reader.script.notes))
    once = reader.variables.assigned
    reader.script.unknown = {
        source: name
        for source, name in reader.variables.unknown.items()
        if source == name or once[name] == 1
    }
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
        self.assignments = Assignments(variables)
        self.builtins = Builtins(variables)
        self.printed: _Printed | None = None
        """Where output goes; None for commands that are to be found."""
        self.depth = 0
        self.line = 1
        """Where the command stands that is followed."""
        variables.output = self._output

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
            if self.printed and (joint == "|" or (joint != ";" and status is None)):
                self.printed.is_certain = False
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
        for question, body in node.branches:
            status = True if question is None else self.run(question)
            if status is None and matters(body):
                shown = self.variables.show(as_text(question))
                self.script.notes.append(f"line {node.line}: taken as false: {shown}")
            if status is None:
                self._undecided(body)
            if status:
                return self.run(body)
        return None

    def _undecided(self, body: Node) -> None:
        """Pass over a branch of which nobody knows whether it is taken."""
        self.variables.may_be_set |= set(assigned_names(body))
        if self.printed:
            self.printed.is_certain = False

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
        outer = self.builtins.lines
        if node.input is not None:
            text = self._read_text(node.input)
            self.builtins.lines = None if text is None else text.split("\n")
        for _ in range(1 if endless else MOST_ROUNDS):
            status = self.run(node.condition)
            if status is None and reads_input(node.condition):
                self._unknown_rounds(node)
            if not status:
                break
            self.run(node.body)
        self.builtins.lines = outer
        return True

    def _unknown_rounds(self, node: While) -> None:
        """Follow a loop once for its launches; what it sets is not known, as is what it reads."""
        names = list(dict.fromkeys(assigned_names(node)))
        before = self.variables.assigned.copy()
        self.variables.assigned.update(names)  # a value that the user gives is the loop's result
        self.run(node.body)
        self.variables.assigned = before
        for name in names:
            self.variables.set_unknown(name)
        if self.printed:
            self.printed.is_certain = False
        if matters(node.body):
            shown = f"; {', '.join(names)} may be given by --set" if names else ""
            self.script.notes.append(
                f"line {node.line}: what this loop reads is not known, and is taken as one "
                f"round{shown}"
            )

    def _case(self, node: Node) -> bool | None:
        assert isinstance(node, Case)
        text = self.variables.emptied(joined(node.word, self.variables))
        if text is None:
            self.script.notes.append(f"line {node.line}: only the default of the case is read")
            for _, body in node.branches:
                self._undecided(body)
        for patterns, body in node.branches:
            for raw in patterns:
                like = pattern(raw, self.variables)
                if like == "*" or (text is not None and fnmatch.fnmatchcase(text, like)):
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
        words = [word for word in node.words if word != "\n"]
        return condition(words, True, self.variables)

    def _simple(self, node: Node) -> bool | None:
        assert isinstance(node, Simple)
        self.line = node.line
        raw = list(node.words)
        own: dict[str, str] = {}
        while raw and (match := ASSIGNMENT.fullmatch(raw[0])):
            raw.pop(0)
            if raw and not all(ASSIGNMENT.fullmatch(word) for word in raw):
                own[match[1]] = self.variables.show(joined(match[4], self.variables))
            else:
                self.assignments.assign(match)
        if not raw:
            return True
        if raw[0] in DECLARING:
            self.assignments.declare(raw)
            return True
        if raw[0] in ("[", "test"):
            return condition(raw[1 : -1 if raw[0] == "[" else None], False, self.variables)
        words = [word for item in raw for word in fields(item, self.variables)]
        return self._command(words, node, own) if words else True

    def _command(self, words: list[str], node: Simple, own: Mapping[str, str]) -> bool | None:
        name, rest = words[0], words[1:]
        if name in ("true", ":", "false"):
            return name != "false"
        if name in self.functions:
            return self._call(self.functions[name], rest)
        if name in ("eval", "source", ".", "let"):
            text = " ".join(rest)
            if name == "let":
                return self._let(text)
            return self._eval(text, node.line) if name == "eval" else self._source(rest)
        if name in Builtins.names:
            given = self._read_text(node.input)
            return self.builtins.run(words, given, own, reads=node.input is not None)
        if words[:2] == ["printf", "-v"] and len(words) > 3:
            self.builtins.printf(words)
            return True
        if self.printed and name in (*PRINTING, "return", "exit", "cd", "shopt"):
            return self._print(words, node)
        self._start(words, node, own)
        return None

    def _start(self, words: list[str], node: Simple, own: Mapping[str, str]) -> None:
        """Keep a command, or those of the script that it is started with."""
        here = self._read_text(node.input) if self._reads_script(words) else None
        place, inner = inner_script(words)
        if not inner:
            place, inner = len(words), here or ""
        before = len(self.script.commands)
        if inner:
            self._nested(inner, node.line)
        if len(self.script.commands) == before:
            shown = tuple(self.variables.show(word) for word in words)
            self.script.commands.append(Command(shown, node.line, own))
        else:
            self._wrap(before, words[:place], own)

    def _print(self, words: list[str], node: Simple) -> bool | None:
        """Follow a command of a command substitution whose output is known."""
        assert self.printed is not None
        if words[0] in ("return", "exit"):
            raise _Returned
        if words[0] in ("cd", "shopt") or node.is_redirected:
            return True
        text = printed(words, self._read_text(node.input))
        if text is None:
            self.printed.is_certain = False
        else:
            self.printed.texts.append(text)
        return True

    def _output(self, text: str) -> str | None:
        """Return what a command substitution prints, None if that is not known."""
        if self.depth >= MOST_DEPTH:
            return None
        try:
            node = parse(text)
        except UserError:
            return None
        saved = self.variables.saved()
        outer = self.printed, self.script, self.builtins.lines
        self.printed, self.script, self.builtins.lines = _Printed(), Script(), None
        self.depth += 1
        try:
            self.run(node)
        except _Returned:
            pass
        self.depth -= 1
        found, commands = self.printed, self.script.commands
        self.printed, self.script, self.builtins.lines = outer
        self.variables.restore(saved)
        if commands or not found.is_certain:
            return None
        return "".join(found.texts).rstrip("\n")

    def _read_text(self, source: Token | None) -> str | None:
        """Return what a redirection gives to read, None if that is not known."""
        if source is None or source.kind == "file":
            return None
        if source.kind == "literal":
            return source.text
        if source.kind == "here":
            return document(source.text, self.variables)
        return joined(source.text, self.variables)

    def _call(self, body: Node, arguments: list[str]) -> bool | None:
        if self.depth >= MOST_DEPTH:
            return None
        saved, self.variables.positional = self.variables.positional, arguments
        self.depth += 1
        self.assignments.locals.append({})
        try:
            status = self.run(body)
        except _Returned:
            status = None
        self.depth -= 1
        self.variables.positional = saved
        for name, value in self.assignments.locals.pop().items():
            if value is None:
                self.variables.unset(name)
            else:
                self.variables.set(name, value)
        return status

    def _eval(self, text: str, line: int) -> bool | None:
        if ATOM.fullmatch(text.strip()) and self.variables.show(text).startswith("$("):
            self._not_read(f"eval {self.variables.show(text)}")
            return None
        return self._nested(text, line)

    def _not_read(self, what: str) -> None:
        self.script.notes.append(f"not read: {what}")
        self.variables.anything_may_be_set = True

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

    def _reads_script(self, words: Sequence[str]) -> bool:
        return words[0].rpartition("/")[2] in (*SHELLS, "sbatch") or words[-1] in SHELLS

    def _wrap(self, before: int, words: Sequence[str], own: Mapping[str, str]) -> None:
        """Put what starts an inner script before the words of its commands."""
        outer = [word for word in words if word.rpartition("/")[2] not in SHELLS]
        prefix = tuple(self.variables.show(word) for word in outer if word != "-c")
        found = self.script.commands
        found[before:] = [
            Command((*prefix, *c.words), c.line, {**own, **c.environment}) for c in found[before:]
        ]

    def _source(self, words: Sequence[str]) -> bool | None:
        path = words[0] if words else ""
        place = (self.folder or Path()) / path
        if not path or ATOM.search(path) or not place.is_file():
            self._not_read(f"source {self.variables.show(path)}")
            return None
        return self._nested(place.read_text(encoding="utf-8", errors="replace"), 0)
