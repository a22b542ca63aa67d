# SPDX-License-Identifier: Apache-2.0
"""Arguments for the recipe, its values and its stages."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmcompressor.args.checks import Checked, Named, about, boolean, optional, reject, string

__all__ = ["RecipeArguments"]


def _recipe(name: str, value: Any) -> Any:
    """Check for a path, recipe text, a recipe or modifiers; the recipe parser checks the rest."""
    if isinstance(value, (bool, int, float)):
        raise reject(name, value, "a path, recipe text, a Recipe, or one or several modifiers")
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _recipe_args(name: str, value: Any) -> dict[str, Any] | list[str]:
    """Check for a dict or ``"key=value"`` strings; stored as a new dict or list."""
    if isinstance(value, Mapping):
        return dict(value)
    several = [value] if isinstance(value, str) else value
    if not isinstance(several, (list, tuple)) or not all(
        isinstance(item, str) and "=" in item for item in several
    ):
        raise reject(name, value, "a dict, or a list of 'key=value' strings")
    return list(several)


@dataclass
class RecipeArguments(Checked):
    """The recipe to apply, its arguments, and its stage."""

    recipe: Named = field(
        default=None,
        metadata=about("The recipe: a path, its text, a Recipe, or modifiers.", optional(_recipe)),
    )
    # HfArgumentParser uses the member before None
    recipe_args: list[str] | None | str | dict[str, Any] = field(  # noqa: RUF036
        default=None,
        metadata=about(
            "Values that override the recipe's own arguments, as key=value.", optional(_recipe_args)
        ),
    )
    clear_sparse_session: bool = field(
        default=False, metadata=about("Reset the session when done.", boolean)
    )
    stage: str | None = field(
        default=None, metadata=about("Run only this stage of the recipe.", optional(string))
    )
