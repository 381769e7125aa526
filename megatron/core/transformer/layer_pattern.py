"""Which layers have something: every N-th, or a pattern with a number for each layer."""

import ast

from megatron.core.utils import UserError

MOST_LAYERS = 10_000
"""Of a model, and of a layer pattern."""


def parse_pattern(text: str) -> int | tuple[int, ...]:
    """Return a frequency, or one number per layer from an expression such as ``([0]*3+[1]*2)*4``.

    Only integers, lists, ``+`` and ``*`` are understood; nothing is evaluated as code.
    """
    try:
        value = _pattern(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise UserError(
            f"a layer pattern is a number or lists such as ([0]*3+[1]*58); not {text!r}"
        ) from None
    return value if isinstance(value, int) else tuple(value)


def _pattern(node: ast.expr) -> int | list[int]:
    """Return the value of a part of a pattern."""
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int(number)):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(number))):
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            values = [_pattern(item) for item in items]
            if all(isinstance(value, int) for value in values):
                return [value for value in values if isinstance(value, int)]
        case ast.BinOp(left=left, op=ast.Add() | ast.Mult() as sign, right=right):
            return _combined(_pattern(left), isinstance(sign, ast.Add), _pattern(right))
    raise ValueError(ast.dump(node))


def _combined(a: int | list[int], adds: bool, b: int | list[int]) -> list[int]:
    if adds and isinstance(a, list) and isinstance(b, list):
        return a + b
    items, count = (a, b) if isinstance(a, list) else (b, a)
    if adds or not isinstance(items, list) or not isinstance(count, int):
        raise ValueError("lists are added to lists and repeated by numbers")
    if len(items) * count > MOST_LAYERS:
        raise ValueError("too long")
    return items * count
