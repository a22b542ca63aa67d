# SPDX-License-Identifier: Apache-2.0
"""A small, safe expression language for ``eval(...)`` in a recipe.

The text is parsed by Python's own parser and the tree is walked here; nothing is ever given to
Python's ``eval``. There are constants, names, arithmetic, comparisons, ``and``/``or``/``not``,
``a if c else b``, tuples and lists, calls of a few functions and of ``math``'s, by themselves
(``sqrt(x)``) or with their module (``math.sqrt(x)``). Everything else is refused, and so is
whatever would take long or grow large (``9**9**9``).

>>> evaluate("start + epochs // 2", {"start": 1, "epochs": 10})
6
>>> evaluate("math.ceil(sqrt(n)) if n > 4 else 'few'", {"n": 10})
4
"""

from __future__ import annotations

import ast
import math
import operator
import reprlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from llmcompressor.errors import RecipeError, did_you_mean
from llmcompressor.runtime.limits import MAX_BITS, copy_values

MAX_CHARACTERS = 4_000
"""Longest expression. Python's parser is safe for short texts only, however they are nested."""
MAX_ITEMS = 10_000
"""Longest string, tuple or list."""
MAX_DIGITS = 400
"""Most digits that ``round`` can be asked for; no float has more."""

Function: TypeAlias = Callable[..., object]


class _RefusedError(Exception):
    """The reason why an expression is not evaluated, for the RecipeError."""


def _round(number: Any, digits: Any = None) -> object:
    """``round`` with limited digits: Python's computes ``10**-digits`` for whole numbers."""
    if isinstance(digits, int) and abs(digits) > MAX_DIGITS:
        raise _RefusedError(f"round takes up to {MAX_DIGITS} digits")
    return round(number, digits)


_MATH_PLAIN = (
    "acos acosh asin asinh atan atan2 atanh cbrt ceil copysign cos cosh degrees dist erf erfc exp "
    "exp2 expm1 fabs floor fmod fsum gamma gcd hypot isclose isfinite isinf isnan isqrt lcm lgamma "
    "log log10 log1p log2 pow prod radians remainder sin sinh sqrt tan tanh trunc"
)
_MATH: dict[str, Function] = {name: getattr(math, name) for name in _MATH_PLAIN.split()}
_MATH_CONSTANTS = {name: getattr(math, name) for name in ("e", "inf", "nan", "pi", "tau")}
# "e" by itself is more likely a forgotten argument than Euler's number.
_BARE_CONSTANTS = {name: _MATH_CONSTANTS[name] for name in ("inf", "pi", "tau")}
_FUNCTIONS: dict[str, Function] = {
    **_MATH,
    "abs": abs,
    "float": float,
    "int": int,
    "max": max,
    "min": min,
    "pow": math.pow,
    "round": _round,
}


def evaluate(expression: str, names: Mapping[str, object] | None = None) -> Any:
    """The value of an expression, computed without executing its author's code.

    Args:
        expression: the text, e.g. ``"0.5 * (1 + math.cos(math.pi * t))"``.
        names: values of names.

    Returns:
        A number, string, boolean, ``None``, tuple, list, or whatever a name stands for.

    Raises:
        RecipeError: the text is no expression, uses what is not allowed or an unknown name, its
            result is too large, or its evaluation fails (division by zero, wrong types).
    """
    try:
        tree = _parse(expression)
        value = _Evaluator(names or {}).value(tree)
        return copy_values(value, f"The value of the expression {expression!r:.80}")
    except _RefusedError as refusal:
        raise _error(expression, str(refusal)) from None
    except RecursionError:
        raise _error(expression, "it is nested too deeply") from None
    except (ArithmeticError, TypeError, ValueError) as failure:
        if isinstance(failure, RecipeError):  # from an argument that is an expression itself
            raise
        raise _error(expression, str(failure) or type(failure).__name__) from failure


def is_expression(text: str) -> bool:
    """Return True if the text parses as one expression, allowed or not."""
    try:
        _parse(text)
    except _RefusedError:
        return False
    return True


def names_in(expression: str) -> frozenset[str]:
    """The names that an expression refers to, without functions and ``math``."""
    tree = _parse(expression)
    calls = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    owners = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return frozenset(
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and id(node) not in calls | owners
    )


def _error(expression: str, reason: str) -> RecipeError:
    shown = expression if len(expression) <= 80 else f"{expression[:77]}..."
    said, found, near = reason.rstrip(". ").partition("Did you mean")
    return RecipeError(
        f"The expression {shown!r} cannot be evaluated: {said.rstrip('. ')}.",
        f"{found}{near}" if found else "Correct it, or write its value instead.",
    )


def _parse(expression: str) -> ast.expr:
    if len(expression) > MAX_CHARACTERS:
        raise _RefusedError(f"it is longer than {MAX_CHARACTERS} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "invalid escape sequence" and the like
            return ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _RefusedError("it is not a valid expression") from None


def _power(left: Any, right: Any) -> object:
    whole = isinstance(left, int) and isinstance(right, int)
    # checked before it is computed: 9**9**9 has 370 million digits
    if whole and abs(left) > 1 and left.bit_length() * right > MAX_BITS:
        raise _RefusedError("the power is too large")
    return left**right


_BINARY: dict[type[ast.operator], Function] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_UNARY: dict[type[ast.unaryop], Function] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
}
_COMPARE: dict[type[ast.cmpop], Function] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
}


class _Evaluator:
    """Evaluates an expression's tree, with a method for each kind of node that is allowed."""

    def __init__(self, names: Mapping[str, object]) -> None:
        self._names = names

    def value(self, node: ast.expr) -> Any:
        kind = type(node).__name__
        handler = getattr(self, f"_{kind.lower()}", None)
        if handler is None:
            raise _RefusedError(f"Python's {kind} is not allowed in a recipe")
        return _check_size(handler(node))

    def _constant(self, node: ast.Constant) -> object:
        if node.value is not None and not isinstance(node.value, (bool, int, float, str)):
            raise _RefusedError(f"{node.value!r} is not allowed in a recipe")
        return node.value

    def _name(self, node: ast.Name) -> object:
        if node.id in self._names:
            return self._names[node.id]
        if node.id in _BARE_CONSTANTS:
            return _BARE_CONSTANTS[node.id]
        if node.id in _FUNCTIONS or node.id == "math":
            raise _RefusedError(f"{node.id!r} is no value")
        hint = did_you_mean(node.id, self._names) or "The recipe declares no arguments"
        raise _RefusedError(f"there is no argument named {node.id!r}. {hint}")

    def _attribute(self, node: ast.Attribute) -> object:
        name = _math_name(node)
        if name not in _MATH_CONSTANTS:
            raise _RefusedError(f"math.{name} is no constant of math that is allowed here")
        return _MATH_CONSTANTS[name]

    def _call(self, node: ast.Call) -> object:
        function = self._function(node.func)
        if node.keywords or any(isinstance(argument, ast.Starred) for argument in node.args):
            raise _RefusedError("a function is called with plain arguments only")
        return function(*[self.value(argument) for argument in node.args])

    def _function(self, node: ast.expr) -> Function:
        if isinstance(node, ast.Attribute):
            name, table = _math_name(node), _MATH
        elif isinstance(node, ast.Name):
            name, table = node.id, _FUNCTIONS
        else:
            raise _RefusedError("only functions may be called")
        if name not in table:
            raise _RefusedError(
                f"the function {name!r} is not allowed in a recipe. {did_you_mean(name, table)}"
            )
        return table[name]

    def _unaryop(self, node: ast.UnaryOp) -> object:
        operation = _UNARY.get(type(node.op))
        if operation is None:
            raise _RefusedError(f"the operator {type(node.op).__name__} is not allowed")
        operand = self.value(node.operand)
        if not isinstance(node.op, ast.Not):
            _require_numbers(operand)
        return operation(operand)

    def _binop(self, node: ast.BinOp) -> object:
        operation = _BINARY.get(type(node.op))
        if operation is None:
            raise _RefusedError(f"the operator {type(node.op).__name__} is not allowed")
        left, right = self.value(node.left), self.value(node.right)
        concatenates = isinstance(node.op, ast.Add) and any(
            isinstance(left, kind) and isinstance(right, kind) for kind in (str, list, tuple)
        )
        # Only numbers: "%" and "*" on strings and lists make large things out of small ones.
        if not concatenates:
            _require_numbers(left, right)
        return operation(left, right)

    def _boolop(self, node: ast.BoolOp) -> object:
        stop = isinstance(node.op, ast.Or)
        result: object = None
        for operand in node.values:
            result = self.value(operand)
            if bool(result) is stop:
                break
        return result

    def _compare(self, node: ast.Compare) -> object:
        left = self.value(node.left)
        result: object = True
        for comparison, operand in zip(node.ops, node.comparators, strict=True):
            if type(comparison) not in _COMPARE:
                raise _RefusedError("a comparison is one of < <= == != >= > in, not in")
            right = self.value(operand)
            result = _COMPARE[type(comparison)](left, right)
            if not result:
                break
            left = right
        return result

    def _ifexp(self, node: ast.IfExp) -> object:
        return self.value(node.body if self.value(node.test) else node.orelse)

    def _list(self, node: ast.List) -> object:
        return [self.value(item) for item in node.elts]

    def _tuple(self, node: ast.Tuple) -> object:
        return tuple(self.value(item) for item in node.elts)


def _math_name(node: ast.Attribute) -> str:
    if isinstance(node.value, ast.Name) and node.value.id == "math":
        return node.attr
    raise _RefusedError(f"the attribute '.{node.attr}' is not allowed: only those of math are")


def _require_numbers(*values: object) -> None:
    for value in values:
        if not isinstance(value, (int, float)):
            raise _RefusedError(f"{reprlib.repr(value)} is not a number")


def _check_size(value: Any) -> Any:
    """The value, if its size is reasonable and it is not a complex number."""
    if isinstance(value, complex):
        raise _RefusedError("the result is a complex number")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise _RefusedError("a number is too large")
    if isinstance(value, (str, list, tuple)) and len(value) > MAX_ITEMS:
        raise _RefusedError("a string or list is too long")
    return value
