# SPDX-License-Identifier: Apache-2.0
"""Field types of modifiers, and error messages for invalid fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError

from llmcompressor.errors import InputError, RecipeError, did_you_mean

__all__ = ["as_recipe_error", "kinds_of"]


def kinds_of(annotation: Any) -> set[Any]:
    """The set of types that an annotation is made of.

    >>> kinds_of(float | list[int] | None) == {float, list, int, type(None)}
    True
    """
    if annotation is Any:
        return {bool, int, float}
    if get_origin(annotation) is Literal:
        return {type(value) for value in get_args(annotation)}
    annotation = getattr(annotation, "__value__", annotation)  # of a type alias
    parts = get_args(annotation)
    outer = getattr(annotation, "__origin__", None) if parts else annotation
    kinds = {kind for part in parts for kind in kinds_of(part)}
    return kinds | {outer} if isinstance(outer, type) else kinds


def as_recipe_error(cls: type[BaseModel], error: ValidationError) -> RecipeError:
    """Turn a pydantic error into a ``RecipeError`` that lists the problems of each field."""
    problems: dict[str, list[str]] = {}
    remedies: list[str] = []
    unknown: list[str] = []
    for detail in error.errors(include_url=False):
        field = str(detail["loc"][0]) if detail["loc"] else ""
        cause = detail.get("ctx", {}).get("error")
        if detail["type"] == "extra_forbidden":
            reason = "it has no such field"
            unknown.append(field)
        elif detail["type"] == "missing":
            reason = "it is required"
            remedies.append(f"Give {field}.")
        elif isinstance(cause, InputError):
            reason = cause.problem.rstrip(".")
            remedies.append(cause.remedy)
        else:
            reason = str(cause or detail["msg"]).rstrip(".")
            if field:
                reason += f" (given: {detail['input']!r})"
                remedies.append(_default_of(cls, field))
        problems.setdefault(field, []).append(reason)
    told = [
        (f"field {field!r}: " if field else "") + ", or ".join(dict.fromkeys(reasons))
        for field, reasons in problems.items()
    ]
    said = " ".join(dict.fromkeys(filter(None, [_nearest_fields(cls, unknown), *remedies])))
    return RecipeError(f"{cls.__name__}: {'; '.join(told)}.", said)


def _default_of(cls: type[BaseModel], field: str) -> str:
    known = cls.model_fields.get(field)
    if known is None or known.is_required():
        return f"Correct {field}."
    default = known.get_default(call_default_factory=True, validated_data={})
    return f"Correct {field}, or leave it out for its default, {default!r}."


def _nearest_fields(cls: type[BaseModel], unknown: Sequence[str]) -> str:
    """Suggest close matches for each unknown field, then list all fields once."""
    if not unknown:
        return ""
    fields = sorted(cls.model_fields)
    hints = {field: did_you_mean(field, fields) for field in unknown}
    near = {field: hint for field, hint in hints.items() if not hint.startswith("Choose")}
    if not near:
        return hints[unknown[0]]
    if len(unknown) > 1:  # name the field that each hint is for
        near = {field: f"For {field!r}, d{hint[1:]}" for field, hint in near.items()}
    return f"{' '.join(near.values())} The fields are: {', '.join(fields)}."
