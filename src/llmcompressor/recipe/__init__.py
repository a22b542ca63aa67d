# SPDX-License-Identifier: Apache-2.0
"""Recipes: reading, checking, combining and writing them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmcompressor.recipe.recipe import Recipe
    from llmcompressor.recipe.stages import Stage

__all__ = ["Recipe", "Stage"]


def __getattr__(name: str) -> Any:
    # On demand, so that the expressions can be used without loading the modifiers.
    if name == "Recipe":
        from llmcompressor.recipe.recipe import Recipe  # noqa: PLC0415

        return Recipe
    if name == "Stage":
        from llmcompressor.recipe.stages import Stage  # noqa: PLC0415

        return Stage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
