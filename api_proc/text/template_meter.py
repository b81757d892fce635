"""Limits on a template that is rendered in the server itself, where nothing can interrupt it.

Only a template of simple parts is rendered there: loops over values, macros, and the operators,
filters and methods listed below, whose time is proportional to the size of their operands. The work
is counted in steps: each pass of a loop or macro counts the nodes in its body, each operand its
size, and each output its length. A value that is assigned to a name has a maximum size, so that
values cannot grow by repetition. Any other template, and any rendering that exceeds the limit, is
left to a process that can be killed.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.defaults import DEFAULT_NAMESPACE
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_STEPS = 20_000
"""Maximum number of evaluated template nodes: some milliseconds, or tens of them in the worst
case."""
MAX_VALUE_SIZE = 2**12
"""Maximum size of a named value, in steps: one for each item, and for each 32 characters."""
_CHARS_PER_STEP = 32
_SHORT_CHARS = 256
"""Shorter texts cost nothing compared with the node that processes them."""
_MAX_INT = 2**64
_MAX_CONSTANT_CHARS = 64
_MAX_CONSTANT_INT = 16
"""For example, an indentation."""
_UNLIMITED = float("inf")

_NODES = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.For, nodes.If, nodes.Macro),
    *(nodes.Assign, nodes.AssignBlock, nodes.Break, nodes.Continue, nodes.Name, nodes.NSRef),
    *(nodes.Const, nodes.Tuple, nodes.List, nodes.Dict, nodes.Pair, nodes.Keyword, nodes.Slice),
    *(nodes.Getattr, nodes.Getitem, nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not),
    *(nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Neg, nodes.Pos),
    *(nodes.Concat, nodes.CondExpr, nodes.Test, nodes.Filter, nodes.Call),
)
_MAKES_VALUES = (
    *(nodes.List, nodes.Dict, nodes.Tuple, nodes.Add, nodes.Concat, nodes.Mul, nodes.Mod),
    *(nodes.Filter, nodes.Call),
)
"""Filters and methods whose result may be more than a part of one operand."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_QUICK_FILTERS = _words("abs count d default first float int last length safe")
"""Filters whose time does not depend on the size of the operand."""
_ITERATING_FILTERS = _words(
    "join list map max min reject rejectattr reverse select selectattr sort unique"
)
"""Filters that process each item, or each character of a text, separately."""
_FILTERS = (
    _QUICK_FILTERS
    | _ITERATING_FILTERS
    | _words("capitalize dictsort e escape items lower replace string title tojson trim upper")
)
_SEARCHING_TESTS = _words("in")
"""Tests whose time depends on the size of an argument."""
_TEST_PLACES = {"select": 0, "reject": 0, "selectattr": 1, "rejectattr": 1}
"""Filters that apply a test, and the position of its name among their arguments."""
_MAPPED_FILTERS = _words("first int items last length list lower string title trim upper")
_METHODS = _words(
    "capitalize count endswith find get index isalpha isdigit items join keys lower lstrip "
    "partition removeprefix removesuffix replace rfind rpartition rsplit rstrip split splitlines "
    "startswith strip title upper values"
)
_FUNCTIONS = _words("namespace raise_exception strftime_now")


class TooManySteps(Exception):
    """The template needs more than the limit."""


class _Meter(threading.local):
    """The remaining steps of a rendering in this thread."""

    num_left: float = _UNLIMITED

    def charge(self, num_steps: float) -> None:
        self.num_left -= num_steps
        if self.num_left < 0:
            raise TooManySteps


_meter = _Meter()


@contextmanager
def limited(max_steps: int | None) -> Iterator[None]:
    """Count the steps of a rendering in this block; raise TooManySteps above the limit."""
    _meter.num_left = _UNLIMITED if max_steps is None else max_steps
    try:
        yield
    finally:
        _meter.num_left = _UNLIMITED


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """Compiles templates that `meter` has accepted."""

    intercepted_binops = frozenset({"*", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, finalize=_charge_output)
        self.filters |= {
            "_steps": _charge_steps,
            "_operand": _charge_operand,
            "_receiver": _charge_receiver,
            "_iterated": _charge_items,
            "_bounded": _bounded,
            "_unnested": _unnested,
        }

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Allow short numbers only, since repetition and formatting of texts have no limit."""
        if _meter.num_left != _UNLIMITED:
            for operand in (left, right):
                if not isinstance(operand, int | float) or not -_MAX_INT < operand < _MAX_INT:
                    raise TooManySteps
        return super().call_binop(context, operator, left, right)


def meter(tree: nodes.Template) -> bool:
    """Add the counting of steps to a template; False, and unchanged, if it is not simple."""
    found = list(tree.find_all(nodes.Node))
    functions = _FUNCTIONS | {node.name for node in found if isinstance(node, nodes.Macro)}
    if not all(_is_simple(node, functions) for node in found):
        return False
    for node in found:
        if isinstance(node, nodes.Stmt):
            _meter_statement(node)
        else:
            _meter_expression(node)
    return True


def _meter_statement(node: nodes.Node) -> None:
    match node:
        case nodes.For():
            node.iter = _checked(node.iter)
            if node.test is not None:
                node.test = nodes.And(_steps(node.test), node.test)
            node.body.insert(0, nodes.ExprStmt(_steps(*node.body)))
        case nodes.Macro():
            node.defaults = [_checked(item) for item in node.defaults]
            node.body.insert(0, nodes.ExprStmt(_steps(*node.body)))
        case nodes.Assign():
            node.node = _checked(node.node)
            if isinstance(node.target, nodes.NSRef):
                node.node = _filter(node.node, "_unnested")
        case nodes.AssignBlock():
            node.filter = _filter(node.filter, "_bounded")


def _meter_expression(node: nodes.Node) -> None:
    match node:
        case nodes.Call():
            node.args = [_checked(item) for item in node.args]
            for keyword in node.kwargs:
                keyword.value = _filter(_checked(keyword.value), "_unnested")
            if isinstance(node.node, nodes.Getattr):
                node.node.node = _filter(node.node.node, "_receiver")
        case nodes.Filter() if node.name not in _QUICK_FILTERS:
            charge = "_iterated" if node.name in _ITERATING_FILTERS else "_operand"
            node.node = _filter(node.node, charge)
        case nodes.Add():
            node.left, node.right = _filter(node.left, "_operand"), _filter(node.right, "_operand")
        case nodes.Concat():
            node.nodes = [_filter(item, "_operand") for item in node.nodes]
        case nodes.Operand() if node.op in ("in", "notin"):
            node.expr = _filter(node.expr, "_receiver")


def _is_simple(node: nodes.Node, functions: Iterable[str]) -> bool:
    if not isinstance(node, _NODES):
        return False
    match node:
        case nodes.For():
            return not node.recursive
        case nodes.Macro():  # where it is not defined, its name means the global
            return node.name not in DEFAULT_NAMESPACE
        case nodes.Name():  # a function keeps its name
            return node.ctx == "load" or node.name not in functions
        case nodes.Filter():
            return node.name in _FILTERS and _is_simple_filter(node)
        case nodes.Test():
            return node.name not in _SEARCHING_TESTS
        case nodes.Call():
            return _is_simple_call(node, functions)
    return True


def _is_simple_filter(node: nodes.Filter) -> bool:
    if node.node is None or node.dyn_args is not None or node.dyn_kwargs is not None:
        return False
    if node.name == "map" and node.args:
        name = node.args[0]
        return isinstance(name, nodes.Const) and name.value in _MAPPED_FILTERS
    if node.name in _TEST_PLACES:
        place = _TEST_PLACES[node.name]
        return all(
            isinstance(test, nodes.Const) and test.value not in _SEARCHING_TESTS
            for test in node.args[place : place + 1]
        )
    if node.name in ("join", "replace", "tojson", "map"):
        return _are_short([*node.args, *(keyword.value for keyword in node.kwargs)])
    return True


def _is_simple_call(node: nodes.Call, functions: Iterable[str]) -> bool:
    if node.dyn_args is not None or node.dyn_kwargs is not None:
        return False
    called = node.node
    if isinstance(called, nodes.Name):
        if called.name != "strftime_now":
            return called.name in functions
        return _are_short(node.args) and not any(map(str.isdigit, str(node.args)))
    if not isinstance(called, nodes.Getattr) or called.attr not in _METHODS:
        return False
    if called.attr == "replace":
        return _are_short(node.args)
    return called.attr != "join" or _are_short([called.node])


def _are_short(operands: list[Any]) -> bool:
    """Return whether these are short constants, so that only the number of uses matters."""
    return all(
        _are_short(operand.items)
        if isinstance(operand, nodes.Tuple)
        else isinstance(operand, nodes.Const)
        and len(str(operand.value)) <= _MAX_CONSTANT_CHARS
        and (not isinstance(operand.value, int) or operand.value <= _MAX_CONSTANT_INT)
        for operand in operands
    )


def _steps(*parts: nodes.Node) -> nodes.Filter:
    """Return a true expression that counts the nodes of these parts and the text in them."""
    num_steps = 1
    for part in parts:
        num_steps += 1
        for node in part.find_all(nodes.Node):
            num_chars = len(node.data) if isinstance(node, nodes.TemplateData) else 0
            num_steps += 1 + num_chars // _CHARS_PER_STEP
    return _filter(nodes.Const(num_steps), "_steps")


def _checked(expression: Any) -> Any:
    """Return an expression with a limit on its value, if it creates one."""
    makes_value = isinstance(expression, _MAKES_VALUES) or expression.find(_MAKES_VALUES)
    return _filter(expression, "_bounded") if makes_value else expression


def _filter(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None)


@pass_context  # so that the compiler does not compute it
def _charge_steps(_: Context, num_steps: int) -> bool:
    _meter.num_left = num_left = _meter.num_left - num_steps
    if num_left < 0:
        raise TooManySteps
    return True


@pass_context
def _charge_operand(_: Context, value: Any) -> Any:
    if type(value) is str and len(value) < _SHORT_CHARS:
        return value
    if _meter.num_left != _UNLIMITED:
        _meter.charge(_size(value, MAX_STEPS))
    return value


@pass_context
def _charge_receiver(_: Context, value: Any) -> Any:
    """Methods of lists and dicts do not look into the items; nor does a search for a value."""
    if isinstance(value, str | list) and len(value) >= _SHORT_CHARS:
        _meter.charge(len(value) // _CHARS_PER_STEP)
    return value


@pass_context
def _charge_items(_: Context, value: Any) -> Any:
    if _meter.num_left != _UNLIMITED:
        _meter.charge(len(value) if isinstance(value, str) else _size(value, MAX_STEPS))
    return value


@pass_context
def _bounded(_: Context, value: Any) -> Any:
    kind = type(value)
    if kind is str and len(value) < _SHORT_CHARS:
        return value
    if kind is bool or (kind is int and -_MAX_INT < value < _MAX_INT):
        return value
    if _meter.num_left != _UNLIMITED:
        size = _size(value, MAX_VALUE_SIZE)
        if size > MAX_VALUE_SIZE:
            raise TooManySteps
        _meter.charge(size)
    return value


@pass_context
def _unnested(_: Context, value: Any) -> Any:
    """Return a value that a namespace may hold: another namespace would hide its size."""
    if _meter.num_left != _UNLIMITED and isinstance(value, Namespace):
        raise TooManySteps
    return value


def _charge_output(value: Any) -> Any:
    if type(value) is not str:
        value = str(value)
    if len(value) >= _SHORT_CHARS:
        _meter.charge(len(value) // _CHARS_PER_STEP)
    return value


def _size(value: Any, max_size: int) -> int:
    """Return the size in steps, counting repeated parts each time; stops beyond `max_size`."""
    if isinstance(value, str):
        return 1 + len(value) // _CHARS_PER_STEP
    if isinstance(value, int):
        return 1 + value.bit_length() // _CHARS_PER_STEP
    if isinstance(value, dict):
        items: Iterable[Any] = (*value, *value.values())
    elif isinstance(value, list | tuple):
        items = value
    else:
        return 1
    size = 1
    for item in items:  # a namespace in a list may contain the list
        size += max_size if isinstance(item, Namespace) else _size(item, max_size - size)
        if size > max_size:
            break
    return size
