"""Bash as far as launch scripts use it: from text to a tree of commands. Nothing is executed.

Words keep their quotes and expansions; `shell_words` expands them. Understood are simple commands
with assignments and arrays, lists with ``&& || ; & |``, ``if``, ``for``, ``while``, ``until``,
``case``, functions, groups, ``[[ ]]``, ``(( ))``, comments, continued lines and here-documents. Of
redirections stays what a command or a loop reads, and that its output goes elsewhere.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megatron.core.utils import UserError

OPERATORS = ("&&", "||", ";;", "|&", ";", "|", "&", "(", ")", "\n")
REDIRECTION = re.compile(r"(\d*|&)(<<<|<<-?|<>|>>|>\||[<>]&?)")
HERE = re.compile(r"<<(-?)[ \t]*(['\"\\]?)([\w.-]+)\2(?!\w)")
ARRAY_START = re.compile(r"[A-Za-z_]\w*\+?=$")
CLOSERS = {"(": ")", "{": "}"}
INPUTS = ("here", "literal", "string", "file")
REDIRECTED = ("output", *INPUTS)


@dataclass
class Token:
    """A word, an operator, an arithmetic command or a redirection.

    Kinds of redirections: ``here`` and ``literal`` are here-documents, the latter with a quoted
    delimiter; ``string`` is the word of ``<<<``; ``file`` is any other input; ``output`` says that
    the standard output goes elsewhere.
    """

    kind: str
    text: str
    line: int


@dataclass
class Simple:
    """A command with its words, assignments first."""

    words: list[str]
    line: int
    input: Token | None = None
    """What it reads."""
    is_redirected: bool = False
    """Its output goes elsewhere."""


@dataclass
class Test:
    """``[[ ... ]]``."""

    words: list[str]
    line: int


@dataclass
class Arithmetic:
    """``(( ... ))``."""

    text: str
    line: int


@dataclass
class Sequence_:
    """Commands with what joins each to the one before: ``;``, ``&&``, ``||`` or ``|``."""

    parts: list[tuple[str, "Node"]]


@dataclass
class Not:
    """``! command``."""

    body: "Node"


@dataclass
class If:
    """Conditions with their bodies; the last condition is None for ``else``."""

    branches: list[tuple["Node | None", "Node"]]
    line: int


@dataclass
class For:
    """``for name in words``; ``for ((...))`` has no name and its header for a word."""

    name: str
    words: list[str]
    body: "Node"


@dataclass
class While:
    """``while condition``; ``until`` is the same with the condition negated."""

    condition: "Node"
    body: "Node"
    line: int
    input: Token | None = None
    """What it reads."""


@dataclass
class Case:
    """``case word in pattern) body ;; esac``."""

    word: str
    branches: list[tuple[list[str], "Node"]]
    line: int


@dataclass
class Function:
    """``name() { body }``."""

    name: str
    body: "Node"


Node = Simple | Test | Arithmetic | Sequence_ | Not | If | For | While | Case | Function


def parse(text: str) -> Node:
    """Return the tree of a script.

    Raises:
        UserError: a quote, bracket or block is not closed.
    """
    return _Parser(list(tokens(text))).script()


def tokens(text: str) -> Iterator[Token]:
    """Yield the tokens of a script.

    Raises:
        UserError: a quote or bracket is not closed.
    """
    return _Scanner(text).tokens()


def too_deep(line: int) -> UserError:
    """Return what to say of brackets or blocks that Python's stack is too short for."""
    return UserError(f"line {line}: brackets or blocks within each other, too many to be read")


class _Scanner:
    """Where we are in the text, and the here-documents that start on the next line."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.waiting: list[tuple[Token, str, bool]] = []

    @property
    def line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def tokens(self) -> Iterator[Token]:
        while self.at < len(self.text):
            if self.text.startswith("\\\n", self.at):
                self.at += 2
            elif self.text[self.at] in " \t\r":
                self.at += 1
            elif self.text[self.at] == "#":
                self.at = _end_of_line(self.text, self.at)
            else:
                line = self.line
                try:
                    yield from self._token()
                except RecursionError:
                    raise too_deep(line) from None
        yield Token("operator", "\n", self.line)

    def _token(self) -> Iterator[Token]:
        text, line = self.text, self.line
        if text.startswith("((", self.at) and (end := text.find("))", self.at)) >= 0:
            yield Token("arithmetic", text[self.at + 2 : end], line)
            self.at = end + 2
        elif text.startswith(("<(", ">("), self.at):
            self.at = closing(text, self.at + 1) + 1
            yield Token("word", "/dev/fd/63", line)
        elif (match := REDIRECTION.match(text, self.at)) is not None:
            yield from self._redirection(match)
        elif (
            operator := next((o for o in OPERATORS if text.startswith(o, self.at)), None)
        ) is None:
            word, self.at = _word(text, self.at)
            yield Token("word", word, line)
        else:
            self.at += len(operator)
            if operator == "\n":
                for here, delimiter, strips in self.waiting:
                    here.text, self.at = _here(text, self.at, delimiter, strips)
                self.waiting = []
            yield Token("operator", operator, line)

    def _redirection(self, match: re.Match[str]) -> Iterator[Token]:
        line, sign = self.line, match[2]
        self.at = _skip_blanks(self.text, match.end())
        word = ""
        if self.text.startswith(("<(", ">("), self.at):
            self.at = closing(self.text, self.at + 1) + 1
        else:
            word, self.at = _word(self.text, self.at)
        if sign in ("<<", "<<-"):
            delimiter = re.sub(r"['\"\\]", "", word)
            here = Token("here" if delimiter == word else "literal", "", line)
            self.waiting.append((here, delimiter, sign == "<<-"))
            yield here  # its text follows on the next lines
        elif sign == "<<<":
            yield Token("string", word, line)
        elif sign[0] == ">" and match[1] in ("", "1", "&"):
            yield Token("output", word, line)
        elif sign[0] == "<" and match[1] in ("", "0"):
            yield Token("file", word, line)


def closing(text: str, at: int) -> int:
    """Return where the bracket, quote or backtick at ``at`` is closed: the last character's place.

    Raises:
        UserError: it is not.
    """
    opener = text[at]
    closer = CLOSERS.get(opener, opener)
    place = at + 1
    waiting: list[tuple[str, bool]] = []
    while place < len(text):
        character = text[place]
        if character == closer:
            return place
        if character == "\\" and opener != "'":
            place += 1
        elif opener == '"':
            if character == "$" and text[place + 1 : place + 2] in ("(", "{"):
                place = closing(text, place + 1)
            elif character == "`":
                place = closing(text, place)
        elif opener in CLOSERS:
            place = _passed(text, place, opener, waiting)
        place += 1
    raise UserError(f"line {text.count(chr(10), 0, at) + 1}: {opener} is not closed")


def _passed(text: str, place: int, opener: str, waiting: list[tuple[str, bool]]) -> int:
    """Return the last place of what stands between brackets at ``place``.

    Args:
        text: the script.
        place: where we are.
        opener: the bracket around.
        waiting: delimiters of here-documents that start on the next line, kept between calls.
    """
    character = text[place]
    if character in "'\"`" or character == opener:
        return closing(text, place)
    if character == "#" and text[place - 1] in " \t\n(":
        return _end_of_line(text, place) - 1
    if opener == "(" and (match := HERE.match(text, place)) and text[place - 1] != "<":
        waiting.append((match[3], bool(match[1])))
        return match.end() - 1
    if character == "\n":
        end = place + 1
        while waiting:
            _, end = _here(text, end, *waiting.pop(0))
        return end - 1
    return place


def _word(text: str, at: int) -> tuple[str, int]:
    """Return the word at ``at`` with its quotes, without continued lines, and where it ends."""
    parts: list[str] = []
    while at < len(text):
        character = text[at]
        if character == "\\":
            parts += [] if text.startswith("\\\n", at) else [text[at : at + 2]]
            at += 2
            continue
        begins_array = character == "(" and ARRAY_START.match("".join(parts))
        if character in "'\"`" or begins_array:
            end = closing(text, at)
        elif character == "$" and text[at + 1 : at + 2] in ("(", "{"):
            end = closing(text, at + 1)
        elif character in " \t\r\n;&|<>()":
            break
        else:
            end = at
        parts.append(text[at : end + 1])
        at = end + 1
    return "".join(parts), at


def _here(text: str, at: int, delimiter: str, strips: bool) -> tuple[str, int]:
    lines = []
    while at < len(text):
        end = _end_of_line(text, at)
        line = text[at:end]
        at = end + 1
        if (line.lstrip("\t") if strips else line) == delimiter:
            break
        lines.append(line)
    return "\n".join(lines), at


def _end_of_line(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _skip_blanks(text: str, at: int) -> int:
    while text[at : at + 1] in (" ", "\t"):
        at += 1
    return at


class _Parser:
    """Recursive descent over tokens."""

    def __init__(self, found: Sequence[Token]) -> None:
        self.found = found
        self.at = 0

    def script(self) -> Node:
        """Return everything to the end."""
        try:
            body = self._list(())
        except RecursionError:
            raise too_deep(self._here().line) from None
        if self.at < len(self.found):
            raise UserError(f"line {self._here().line}: unexpected {self._here().text!r}")
        return body

    def _here(self) -> Token:
        return self.found[min(self.at, len(self.found) - 1)]

    def _is(self, *texts: str) -> bool:
        return self.at < len(self.found) and self._here().text in texts

    def _take(self, *expected: str) -> Token:
        token = self._here()
        if self.at >= len(self.found) or (expected and token.text not in expected):
            wanted = " or ".join(repr(text) for text in expected) or "more"
            raise UserError(f"line {token.line}: {wanted} is missing")
        self.at += 1
        return token

    def _skip(self, *texts: str) -> None:
        while self._is(*texts):
            self.at += 1

    def _list(self, ends: Sequence[str]) -> Sequence_:
        """Return commands up to a word that ends the block, which is not taken."""
        parts: list[tuple[str, Node]] = []
        joint = ";"
        while True:
            self._skip("\n", ";", "&")
            if self.at >= len(self.found) or self._is(*ends):
                return Sequence_(parts)
            if self._here().kind == "operator" and not self._is("(", "|", "|&", "&&", "||"):
                return Sequence_(parts)
            parts.append((joint, self._command()))
            joint = ";"
            if self._is("&&", "||", "|", "|&"):
                joint = self._take().text.replace("|&", "|")

    def _command(self) -> Node:
        token = self._here()
        compound: dict[str, Callable[[], Node]] = {
            "if": self._if,
            "for": self._for,
            "select": self._for,
            "while": self._while,
            "until": self._while,
            "case": self._case,
            "function": self._function,
            "{": lambda: self._group("}"),
            "(": lambda: self._group(")"),
            "[[": self._test,
        }
        if token.kind == "arithmetic":
            self.at += 1
            return Arithmetic(token.text, token.line)
        if token.text == "!":
            self.at += 1
            return Not(self._command())
        if token.text in compound:
            return self._redirected(compound[token.text]())
        following = self.found[self.at + 1 : self.at + 3]
        if [t.text for t in following] == ["(", ")"]:
            return self._function()
        return self._simple()

    def _simple(self) -> Simple:
        start, first = self.at, self._here()
        command = Simple([], first.line)
        while self.at < len(self.found) and self._here().kind in ("word", *REDIRECTED):
            token = self._take()
            if token.kind == "word":
                command.words.append(token.text)
            elif token.kind == "output":
                command.is_redirected = True
            else:
                command.input = token
        if self.at == start:
            raise UserError(f"line {first.line}: unexpected {first.text!r}")
        return command

    def _redirected(self, node: Node) -> Node:
        """Take the redirections behind a block; a loop keeps what it reads."""
        while self.at < len(self.found) and self._here().kind in REDIRECTED:
            token = self._take()
            if isinstance(node, While) and token.kind in INPUTS:
                node.input = token
        return node

    def _group(self, end: str) -> Node:
        self.at += 1
        body = self._list((end,))
        self._take(end)
        return body

    def _test(self) -> Node:
        line = self._take("[[").line
        words = []
        while not self._is("]]"):
            words.append(self._take().text)
        self._take("]]")
        return Test(words, line)

    def _if(self) -> Node:
        line = self._take("if").line
        branches: list[tuple[Node | None, Node]] = []
        condition: Node | None = self._list(("then",))
        self._take("then")
        while True:
            branches.append((condition, self._list(("elif", "else", "fi"))))
            word = self._take("elif", "else", "fi").text
            if word == "fi":
                return If(branches, line)
            condition = self._list(("then",)) if word == "elif" else None
            self._skip("then")

    def _for(self) -> Node:
        self.at += 1
        token = self._take()
        words: list[str] = []
        self._skip("\n")
        if token.kind == "word" and self._is("in"):
            self.at += 1
            while self._here().kind == "word" and not self._is("\n", ";"):
                words.append(self._take().text)
        self._skip("\n", ";")
        self._take("do", "{")
        body = self._list(("done", "}"))
        self._take("done", "}")
        if token.kind == "arithmetic":
            return For("", [token.text], body)
        return For(token.text, words, body)

    def _while(self) -> Node:
        line = self._here().line
        negates = self._take().text == "until"
        condition: Node = self._list(("do",))
        self._take("do")
        body = self._list(("done",))
        self._take("done")
        return While(Not(condition) if negates else condition, body, line)

    def _case(self) -> Node:
        line = self._take("case").line
        word = self._take().text
        self._skip("\n")
        self._take("in")
        branches: list[tuple[list[str], Node]] = []
        self._skip("\n")
        while not self._is("esac"):
            self._skip("(")
            patterns = [self._take().text]
            while self._is("|"):
                self.at += 1
                patterns.append(self._take().text)
            self._take(")")
            branches.append((patterns, self._list((";;", "esac"))))
            self._skip(";;", "\n")
        self._take("esac")
        return Case(word, branches, line)

    def _function(self) -> Node:
        self._skip("function")
        name = self._take().text
        self._skip("(", ")", "\n")
        return Function(name, self._command())
