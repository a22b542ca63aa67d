# SPDX-License-Identifier: Apache-2.0
"""Validation of argument fields, applied whenever a field is set.

A check takes the field's name and value, raises :class:`~llmcompressor.errors.ArgumentError`,
and returns the value to store (its canonical spelling, where there are several).

transformers' ``HfArgumentParser`` passes all metadata of a field to argparse, which accepts
``help`` but not ``check``. So ``help`` is the only entry, and carries the rest (:class:`About`).
For a union with ``str`` the parser uses one of the first two members as the argument's type, so a
union of strings and other types begins with ``Text | str``.
"""

from __future__ import annotations

import dataclasses
import operator
import os
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from math import inf
from typing import TYPE_CHECKING, Any, NewType, SupportsIndex, TypeAlias

from llmcompressor.errors import ArgumentError, did_you_mean

Check = Callable[[str, Any], Any]

Text = NewType("Text", str)
"""A text, where a field holds other things too."""

if TYPE_CHECKING:
    Named: TypeAlias = Any
else:
    Named: TypeAlias = Text | str | Any
"""The name or path of a thing, or the thing itself."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?(?:E\+?\d{1,2})?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_A_SIZE = "a whole number of bytes, or a size such as '8GiB'"


class FieldHelp(str):
    """The help text of a field, with its check.

    Attributes:
        check: the check of the field's values.
        off: the help of ``--no-field``, for a field that is true by default.
        option: the name on the command line, where that is not the field's.
    """

    __slots__ = ("check", "off", "option")

    check: Check
    off: str | None
    option: str | None


def argument(
    help_text: str,
    check: Check,
    *,
    default: Any = None,
    factory: Any = dataclasses.MISSING,
    off: str | None = None,
    option: str | None = None,
) -> Any:
    """Return the field of a dataclass for an argument.

    Args:
        help_text: its description on the command line.
        check: the check of its values.
        default: its default; ``MISSING`` if it is required.
        factory: makes the default, if that is mutable.
        off: the help of ``--no-field``, for a field that is true by default.
        option: the name on the command line, where that is not the field's.
    """
    found = FieldHelp(help_text)
    found.check, found.off, found.option = check, off, option
    if factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=factory, metadata={"help": found})
    return dataclasses.field(default=default, metadata={"help": found})


class CheckedFields:
    """Base of dataclasses whose fields are checked on creation and on every assignment."""

    def __setattr__(self, name: str, value: Any) -> None:
        known: Mapping[str, dataclasses.Field[Any]] = getattr(self, "__dataclass_fields__", {})
        if name in known:
            found = known[name].metadata.get("help")
            value = found.check(name, value) if isinstance(found, FieldHelp) else value
        elif not name.startswith("_") and not hasattr(type(self), name):
            raise ArgumentError(f"There is no argument named {name!r}.", did_you_mean(name, known))
        super().__setattr__(name, value)


def invalid_value(name: str, value: Any, expected: str) -> ArgumentError:
    """Return the error for a value of the wrong kind or out of bounds."""
    shown = repr(value)
    if len(shown) > 80:
        shown = f"a {type(value).__name__}"
    return ArgumentError(f"The argument {name!r} cannot be {shown}.", f"Give {expected}.")


def anything(name: str, value: Any) -> Any:
    """Accept any value; it is checked where it is used."""
    return value


def optional(check: Check) -> Check:
    """Return a check that accepts ``None`` besides the values of ``check``."""
    return lambda name, value: None if value is None else check(name, value)


def boolean(name: str, value: Any) -> bool:
    """Check for ``True`` or ``False``, not for truthiness."""
    if not isinstance(value, bool):
        raise invalid_value(name, value, "True or False")
    return value


def integer(least: int, most: float = inf) -> Check:
    """Return a check for an integer from ``least`` to ``most``."""

    def check(name: str, value: Any) -> int:
        expected = f"a whole number of at least {least}"
        expected += f" and at most {most}" if most < inf else ""
        if isinstance(value, bool):
            raise invalid_value(name, value, expected)
        try:
            whole = operator.index(value)
        except TypeError:
            raise invalid_value(name, value, expected) from None
        if not least <= whole <= most:
            raise invalid_value(name, value, expected)
        return whole

    return check


def number(least: float, most: float) -> Check:
    """Return a check for a number from ``least`` to ``most``."""

    def check(name: str, value: Any) -> float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not least <= value <= most:
            raise invalid_value(name, value, f"a number from {least} to {most}")
        return float(value)

    return check


def divergence(name: str, value: Any) -> float:
    """Check for a limit of the KL divergence, in nats a token."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value <= 100:
        raise invalid_value(name, value, "nats a token, above 0 and at most 100, such as 0.01")
    return float(value)


def string(name: str, value: Any) -> str:
    """Check for a string that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise invalid_value(name, value, "a string that is not empty")
    return value


def path(name: str, value: Any) -> str:
    """Check for a path, given as a string or a path object; stored as a string."""
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise invalid_value(name, value, "a path")
    return str(os.fspath(value))


def strings(name: str, value: Any) -> list[str]:
    """Check for one string or several; stored as a new list."""
    several = [value] if isinstance(value, str) else value
    if not isinstance(several, (list, tuple)) or not all(isinstance(s, str) for s in several):
        raise invalid_value(name, value, "a list of strings")
    return list(several)


def mapping(name: str, value: Any) -> Mapping[str, Any]:
    """Check for a dict with string keys; stored as a new dict."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise invalid_value(name, value, "a dict with string keys")
    return dict(value)


def one_of(options: Mapping[str, str]) -> Check:
    """Return a check for one of the names in ``options``, stored as the name it maps to.

    Upper case, ``-`` and spaces are normalized to lower case and ``_``, as in ``options``.
    """

    def check(name: str, value: Any) -> str:
        if isinstance(value, str):
            found = options.get(value.strip().lower().replace("-", "_").replace(" ", "_"))
            if found is not None:
                return found
        problem = f"The argument {name!r} cannot be {value!r}."
        raise ArgumentError(problem, did_you_mean(str(value), options))

    return check


def size(name: str, value: Any) -> int:
    """Check for a number of bytes, or a number with a unit such as GiB; stored as bytes.

    >>> size("budget", "8GiB"), size("budget", "1e9"), size("budget", 2.0e9)
    (8589934592, 1000000000, 2000000000)
    """
    given = value
    if isinstance(value, str):
        found = _SIZE.fullmatch(value.strip())
        if found is None:
            raise invalid_value(name, given, _A_SIZE)
        digits, prefix, binary = found.groups()
        base = 1024 if binary else 1000
        value = Decimal(digits) * base ** " KMGT".index(prefix.upper() or " ")
        value = int(value) if prefix or value % 1 == 0 else value
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or operator.index(value) < 1:
        raise invalid_value(name, given, _A_SIZE)
    return operator.index(value)
