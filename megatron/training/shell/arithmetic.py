"""The value of an arithmetic expression of bash whose variables are filled in."""

import ast
import operator
import re
from collections.abc import Callable, Mapping

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


def evaluated(text: str) -> int:
    """Return the value of an expression of numbers.

    Raises:
        Unknown: it holds something else, or is not understood.
    """
    text = text.replace("&&", " and ").replace("||", " or ")
    text = re.sub(r"!(?!=)", " not ", re.sub(r"(?<!/)/(?!/)", "//", text))
    text = re.sub(r"\b0+(?=\d)", "", text)
    try:
        return _evaluated(ast.parse(text.strip(), mode="eval").body)
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
