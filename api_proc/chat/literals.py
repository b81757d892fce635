"""Values that models write as Python literals."""

import ast
from typing import Any

_MAX_INT_BITS = 1024
_NAMES = {"true": True, "false": False, "null": None}


def parse_literal(text: str) -> Any:
    """Return the value of a literal whose JSON exists; raises ValueError for any other text."""
    return literal_value(_parsed(text))


def parse_arguments(text: str, names: list[str]) -> dict[str, Any]:
    """Return the arguments between the parentheses of a call; `names` are those of positions."""
    call = _parsed(f"f({text})")
    if not isinstance(call, ast.Call) or len(call.args) > len(names):
        raise ValueError("not the arguments of a call")
    values = dict(zip(names, map(literal_value, call.args), strict=False))
    for keyword in call.keywords:
        if keyword.arg is None:
            raise ValueError("an argument has no name")
        values[keyword.arg] = literal_value(keyword.value)
    return values


def literal_value(node: ast.expr | None) -> Any:
    """Return the value of an expression; JSON's names count as literals too."""
    match node:
        case ast.Constant(value=int() as value) if value.bit_length() > _MAX_INT_BITS:
            pass  # Python prints no such number
        case ast.Constant(value=None | str() | bool() | int()):
            return node.value
        case ast.Constant(value=float() as value) if abs(value) < float("inf"):
            return value
        case ast.Name(id="true" | "false" | "null"):
            return _NAMES[node.id]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float())):
            return -literal_value(node.operand)
        case ast.List() | ast.Tuple():
            return [literal_value(item) for item in node.elts]
        case ast.Dict():
            keys = [literal_value(key) for key in node.keys]
            if all(isinstance(key, str) for key in keys):
                return dict(zip(keys, map(literal_value, node.values), strict=True))
    raise ValueError("not a literal")


def _parsed(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError("not an expression") from error
