# SPDX-License-Identifier: Apache-2.0
"""Renewed recipes: copies of used modifiers, as each modifier runs only once."""

from __future__ import annotations

from dataclasses import replace

from llmcompressor.modifiers.modifier import Modifier
from llmcompressor.recipe.recipe import Recipe

__all__ = ["unused"]


def unused(recipe: Recipe) -> Recipe:
    """The recipe with a new modifier in place of each that has been initialized.

    A modifier can be run only once. With this, one recipe serves several models, or a further
    attempt after an error.
    """
    if not any(modifier.initialized for modifier in recipe.modifiers):
        return recipe
    stages = [
        replace(stage, modifiers=tuple(map(_like, stage.modifiers))) for stage in recipe.stages
    ]
    return Recipe(stages, args=recipe.args)


def _like(modifier: Modifier) -> Modifier:
    fields = {name: getattr(modifier, name) for name in modifier.model_fields_set}
    return type(modifier)(**fields) if modifier.initialized else modifier
