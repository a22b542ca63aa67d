# SPDX-License-Identifier: Apache-2.0
"""Recipes: reading, checking, combining and writing them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmcompressor.runtime.registry import lazy_exports

if TYPE_CHECKING:
    from llmcompressor.recipe.arguments import RecipeArgs as RecipeArgsInput
    from llmcompressor.recipe.recipe import Recipe, RecipeContainer, RecipeInput
    from llmcompressor.recipe.stages import Stage

    RecipeStageInput = str

__all__ = [
    "Recipe",
    "RecipeArgsInput",
    "RecipeContainer",
    "RecipeInput",
    "RecipeStageInput",
    "Stage",
]

_HOMES = {
    "Recipe": ".recipe",
    "RecipeArgsInput": "llmcompressor.recipe.arguments:RecipeArgs",
    "RecipeContainer": ".recipe",
    "RecipeInput": ".recipe",
    "RecipeStageInput": "builtins:str",
    "Stage": ".stages",
}

# On demand, so that the expressions can be used without loading the modifiers.
__getattr__, __dir__ = lazy_exports(globals(), _HOMES)
