# SPDX-License-Identifier: Apache-2.0
"""Complete signatures of entry points for ``inspect.signature`` and ``help``."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, get_args, get_type_hints

from llmcompressor.args.checks import Text

__all__ = ["with_arguments_of"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_VARIABLE = inspect.Parameter.VAR_KEYWORD


def with_arguments_of(*classes: type) -> Callable[[_Function], _Function]:
    """Return a decorator that adds the fields of dataclasses to a function's signature.

    They follow the function's own parameters as keyword-only parameters. ``**arguments`` is kept,
    as it accepts the names of earlier releases.

    Args:
        classes: the dataclasses; for a field that several have, the first one counts.
    """

    def decorate(function: _Function) -> _Function:
        found = inspect.signature(function, eval_str=True)
        own = [one for one in found.parameters.values() if one.kind != _VARIABLE]
        rest = [one for one in found.parameters.values() if one.kind == _VARIABLE]
        shown = {one.name: one for one in own}
        for one in itertools.chain.from_iterable(map(_parameters, classes)):
            shown.setdefault(one.name, one)
        signature = found.replace(parameters=[*shown.values(), *rest])
        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    return decorate


def _parameters(cls: type) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if field.init:
            yield inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=_default(field),
                annotation=_shown(hints[field.name]),
            )


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default


def _shown(hint: Any) -> Any:
    """Remove the marker type for ``HfArgumentParser`` from a type hint."""
    members = get_args(hint)
    if Text not in members:
        return hint
    return functools.reduce(operator.or_, (one for one in members if one is not Text))
