# SPDX-License-Identifier: Apache-2.0
"""A recipe's arguments: their declaration, overrides, and ``eval(...)`` in its strings.

A string that is one ``eval(EXPR)`` becomes the expression's value, type and all; within a longer
string each ``eval(EXPR)`` is replaced by its value's text. Arguments may use each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import yaml

from llmcompressor.errors import RecipeError, did_you_mean
from llmcompressor.recipe.document import RecipeLoader
from llmcompressor.recipe.expressions import evaluate, is_expression, names_in
from llmcompressor.runtime.limits import copy_values

RecipeArgs: TypeAlias = "Mapping[str, Any] | Iterable[str] | str | None"
"""Overrides of a recipe's ``args``: a mapping, or ``"name=value"`` texts."""

_OPENING = re.compile(r"(?<!\w)eval\(")


@dataclass(frozen=True)
class _Expression:
    """The expression inside of ``eval(...)``."""

    source: str


class Arguments(Mapping[str, object]):
    """Arguments of a recipe by name, resolved on first access.

    >>> Arguments({"first": 2, "last": "eval(first + 10)"})["last"]
    12
    """

    def __init__(self, declared: Mapping[str, object]) -> None:
        self._declared = dict(declared)
        self._resolved: dict[str, object] = {}
        self._pending: list[str] = []

    def __getitem__(self, name: str) -> object:
        if name in self._resolved:
            return self._resolved[name]
        value = self._declared[name]
        if name in self._pending:
            cycle = " → ".join([*self._pending[self._pending.index(name) :], name])
            raise RecipeError(
                f"The recipe's arguments need each other: {cycle}.",
                "Give one of them a value that does not depend on the others.",
            )
        self._pending.append(name)
        try:
            self._resolved[name] = self.resolve(value)
        finally:
            self._pending.pop()
        return self._resolved[name]

    def __contains__(self, name: object) -> bool:
        return name in self._declared

    def __iter__(self) -> Iterator[str]:
        return iter(self._declared)

    def __len__(self) -> int:
        return len(self._declared)

    @property
    def used(self) -> dict[str, object]:
        """The arguments accessed so far, with their values."""
        return dict(self._resolved)

    def resolve(self, value: Any) -> Any:
        """A copy of the value with every ``eval(...)`` in its strings replaced.

        Raises:
            RecipeError: an expression is wrong, or the result is too large.
        """
        return copy_values(self._resolve(value), "What the recipe's expressions stand for")

    def _resolve(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._resolve_text(value)
        if isinstance(value, Mapping):
            return {key: self._resolve(item) for key, item in value.items()}
        if type(value) in (list, tuple):  # a named tuple is a value of its own
            return type(value)([self._resolve(item) for item in value])
        return value

    def _resolve_text(self, text: str) -> object:
        parts = _split_expressions(text)
        if all(isinstance(part, str) for part in parts):
            return text
        spoken = [part for part in parts if not isinstance(part, str) or part.strip()]
        if len(spoken) == 1 and isinstance(spoken[0], _Expression):
            return evaluate(spoken[0].source, self)
        return "".join(
            part if isinstance(part, str) else str(evaluate(part.source, self)) for part in parts
        )


def parse_overrides(recipe_args: RecipeArgs) -> dict[str, object]:
    """Parse overrides by name; values of ``"name=value"`` texts are read as YAML.

    >>> parse_overrides(["bits=4", "scheme=W4A16", "ignore=[lm_head]"])
    {'bits': 4, 'scheme': 'W4A16', 'ignore': ['lm_head']}

    Args:
        recipe_args: a mapping, one ``"name=value"`` or several of them.

    Raises:
        RecipeError: one has no ``=`` or no name.
    """
    if recipe_args is None:
        return {}
    if isinstance(recipe_args, Mapping):
        pairs: list[tuple[Any, Any]] = list(recipe_args.items())
    else:
        texts = [recipe_args] if isinstance(recipe_args, str) else recipe_args
        pairs = [_parse_pair(text) for text in texts]
    for name, _ in pairs:
        if not isinstance(name, str) or not name.isidentifier():
            raise RecipeError(
                f"{name!r} is not the name of a recipe argument.",
                "recipe_args takes a dict or a list of texts such as 'bits=4'.",
            )
    return dict(copy_values(dict(pairs), "recipe_args"))


def _parse_pair(text: object) -> tuple[str, object]:
    if not isinstance(text, str) or "=" not in text:
        raise RecipeError(
            f"{text!r} in recipe_args is not of the form 'name=value'.",
            "recipe_args takes a dict or a list of texts such as 'bits=4'.",
        )
    name, _, written = text.partition("=")
    if not written.strip():
        return name.strip(), ""
    try:
        return name.strip(), yaml.load(written, RecipeLoader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return name.strip(), written  # a text such as "a: b: c"


def names_used(value: object) -> frozenset[str]:
    """Names that the ``eval(...)`` expressions anywhere in the value refer to."""
    if isinstance(value, str):
        expressions = [part for part in _split_expressions(value) if isinstance(part, _Expression)]
        return frozenset().union(*(names_in(part.source) for part in expressions))
    if isinstance(value, Mapping):
        return frozenset().union(*(names_used(item) for item in value.values()))
    if isinstance(value, (list, tuple)):
        return frozenset().union(*(names_used(item) for item in value))
    return frozenset()


def reject_unknown_overrides(overrides: Mapping[str, object], known: Iterable[str]) -> None:
    """Raise for an override that no argument declares and no expression uses.

    Raises:
        RecipeError: names the override and what could have been meant.
    """
    names = set(known) | names_used(overrides)
    for name in overrides:
        if name not in names:
            raise RecipeError(
                f"recipe_args sets {name!r}, which the recipe neither declares in `args` "
                "nor uses in an eval(...) expression.",
                did_you_mean(name, names) or "The recipe has no arguments: leave it out.",
            )


def escape_expressions(text: str) -> str:
    """Escape a text so that it reads back as itself, also when it contains ``eval(``.

    >>> escape_expressions("plain"), escape_expressions("eval(x)")
    ('plain', "eval('eval(x)')")
    """
    return f"eval({text!r})" if _OPENING.search(text) else text


def _split_expressions(text: str) -> list[str | _Expression]:
    """Split a text at its ``eval(...)`` expressions.

    An expression ends at the first closing parenthesis up to which it can be parsed, so that
    parentheses and quotes inside it need no rules of their own.
    """
    parts: list[str | _Expression] = []
    position = 0
    while opening := _OPENING.search(text, position):
        end = _closing_parenthesis(text, opening.end())
        parts += [text[position : opening.start()], _Expression(text[opening.end() : end])]
        position = end + 1
    parts.append(text[position:])
    return [part for part in parts if part != ""]


def _closing_parenthesis(text: str, start: int) -> int:
    end = text.find(")", start)
    while end >= 0:
        if is_expression(text[start:end]):
            return end
        end = text.find(")", end + 1)
    raise RecipeError(
        f"{text[start - 5 :]!r:.90} in the recipe is not a valid expression.",
        "Write eval(EXPRESSION), e.g. eval(start + 2), in quotes if it has a comma, colon or "
        "bracket; for the literal text write "
        f"{'eval(' + repr(text) + ')':.120}.",
    )
