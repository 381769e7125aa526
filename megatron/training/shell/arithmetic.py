"""The value of an arithmetic expression of bash whose variables are filled in.

Numbers have 64 bits and wrap around, as in bash. What is not known makes the result unknown only
where the result hangs on it: not in the branch of ``? :`` that is not taken.
"""

import operator
import re
from collections.abc import Callable, Mapping

UNKNOWN = "@"
"""Stands in a text for a value that is not known."""
MOST_NESTED = 200
"""Parentheses and signs within each other; more are no launch script's."""
TOKEN = re.compile(
    r"\s*(0[xX][0-9a-fA-F]+|\d+#\w+|\d+|@|\*\*|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%<>&|^!~?:(),])"
)

Number = int | None


class Unknown(Exception):
    """A value hangs on something that is not known."""


def _quotient(a: int, b: int) -> int:
    """Return the quotient, rounded towards zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _power(a: int, b: int) -> int:
    if b < 0:
        raise ZeroDivisionError
    return pow(a, b, 1 << 64)


BINARY: Mapping[str, tuple[int, Callable[[int, int], int]]] = {
    "|": (3, operator.or_),
    "^": (4, operator.xor),
    "&": (5, operator.and_),
    "==": (6, operator.eq),
    "!=": (6, operator.ne),
    "<": (7, operator.lt),
    "<=": (7, operator.le),
    ">": (7, operator.gt),
    ">=": (7, operator.ge),
    "<<": (8, lambda a, b: a << (b % 64)),
    ">>": (8, lambda a, b: a >> (b % 64)),
    "+": (9, operator.add),
    "-": (9, operator.sub),
    "*": (10, operator.mul),
    "/": (10, _quotient),
    "%": (10, lambda a, b: a - b * _quotient(a, b)),
    "**": (11, _power),
}
"""How tightly operators bind, and what they do; ``&&`` binds at 2 and ``||`` at 1."""
LOGICAL = {"||": 1, "&&": 2}


def evaluated(text: str) -> int:
    """Return the value of an expression of numbers.

    Raises:
        Unknown: it holds something else, or is not understood.
    """
    value = _Parser(text).whole()
    if value is None:
        raise Unknown(text)
    return value


def _wrapped(value: int) -> int:
    """Return what 64 bits hold of a number."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


class _Parser:
    """Reads an expression from left to right, by precedence; None is a value that is unknown."""

    def __init__(self, text: str) -> None:
        self.text, self.tokens, self.at, self.depth = text, list[str](), 0, 0
        end = 0
        text = text.rstrip()
        while end < len(text):
            match = TOKEN.match(text, end)
            if match is None:
                raise Unknown(text)
            self.tokens.append(match[1])
            end = match.end()

    def whole(self) -> Number:
        value = self._comma()
        if self.at < len(self.tokens):
            raise Unknown(self.text)
        return value

    def _next(self, *wanted: str) -> str:
        """Take the next token if it is one of those; otherwise return ''."""
        if self.at < len(self.tokens) and self.tokens[self.at] in wanted:
            self.at += 1
            return self.tokens[self.at - 1]
        return ""

    def _expect(self, token: str) -> None:
        if not self._next(token):
            raise Unknown(self.text)

    def _comma(self) -> Number:
        value = self._choice()
        while self._next(","):
            value = self._choice()
        return value

    def _choice(self) -> Number:
        self._enter()
        condition = self._binary(1)
        if self._next("?"):
            first = self._comma()
            self._expect(":")
            second = self._choice()
            condition = None if condition is None else (first if condition else second)
        self.depth -= 1
        return condition

    def _binary(self, least: int) -> Number:
        """Return the value of operators that bind at ``least`` or tighter."""
        left = self._unary()
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            if token in LOGICAL and LOGICAL[token] >= least:
                self.at += 1
                left = _joined(token, left, self._binary(LOGICAL[token] + 1))
            elif token in BINARY and BINARY[token][0] >= least:
                self.at += 1
                binds, action = BINARY[token]
                # Only powers are read from the right.
                right = self._binary(binds + (token != "**"))
                left = _applied(action, left, right)
            else:
                break
        return left

    def _unary(self) -> Number:
        self._enter()
        if sign := self._next("!", "~", "-", "+"):
            inner = self._unary()
            if inner is not None:
                values = {"!": int(not inner), "~": ~inner, "-": -inner, "+": inner}
                inner = _wrapped(values[sign])
        elif self._next("("):
            inner = self._comma()
            self._expect(")")
        else:
            inner = self._number()
        self.depth -= 1
        return inner

    def _enter(self) -> None:
        self.depth += 1
        if self.depth > MOST_NESTED:
            raise Unknown(self.text)

    def _number(self) -> Number:
        if self.at == len(self.tokens):
            raise Unknown(self.text)
        token = self.tokens[self.at]
        self.at += 1
        if token == UNKNOWN:
            return None
        base, mark, digits = token.partition("#")
        try:
            if mark:
                return _wrapped(int(digits, int(base)))
            if token.lower().startswith("0x"):
                return _wrapped(int(token, 16))
            return _wrapped(int(token, 8 if token[0] == "0" else 10))
        except ValueError as error:  # an operator, or digits that the base does not have
            raise Unknown(self.text) from error


def _joined(token: str, left: Number, right: Number) -> Number:
    """Return the value of ``left && right`` or ``left || right``."""
    decides = token == "||"  # one true operand decides, or one false of &&
    if any(one is not None and bool(one) == decides for one in (left, right)):
        return int(decides)
    return None if left is None or right is None else int(not decides)


def _applied(action: Callable[[int, int], int], left: Number, right: Number) -> Number:
    if left is None or right is None:
        return None
    try:
        return _wrapped(int(action(left, right)))
    except ZeroDivisionError:  # bash stops; of a branch that is not taken nobody knows
        return None
