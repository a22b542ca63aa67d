# SPDX-License-Identifier: Apache-2.0
"""A recipe that can be applied again: modifiers serve once."""

from __future__ import annotations

from dataclasses import replace

from llmcompressor.modifiers.modifier import Modifier
from llmcompressor.recipe.recipe import Recipe

__all__ = ["unused"]


def unused(recipe: Recipe) -> Recipe:
    """The recipe with a new modifier in place of each that was part of a run before.

    A modifier serves once; whoever compresses several models by one recipe, or tries again after
    an error, need not know that.
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
