# SPDX-License-Identifier: Apache-2.0
"""Text of ``recipe.yaml``: the stages applied by a run, after those of the original model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llmcompressor.checkpoint.save import RECIPE_FILE
from llmcompressor.errors import RecipeError
from llmcompressor.logger import logger
from llmcompressor.recipe import Recipe, Stage
from llmcompressor.recipe.recipe import earlier_stages
from llmcompressor.recipe.stages import number_clashes
from llmcompressor.recipe.writing import to_yaml

__all__ = ["applied_recipe", "stages_before"]


def stages_before(source: str | None) -> tuple[Stage, ...]:
    """Stages of the ``recipe.yaml`` in a model's folder; empty, with a warning, if unreadable."""
    file = None if source is None else Path(source) / RECIPE_FILE
    return () if file is None or not file.is_file() else earlier_stages(file)


def applied_recipe(recipe: Recipe, before: Sequence[Stage]) -> str | None:
    """Return the text of a checkpoint's ``recipe.yaml``; ``None`` if there are no stages.

    Args:
        recipe: the recipe that the run applies.
        before: stages that produced the original model; they come first.
    """
    own = recipe.stages if recipe.modifiers else ()
    if before:
        text = to_yaml(number_clashes([*before, *own]))
        try:
            Recipe.create_instance(text)
        except RecipeError as error:  # an order that one run could not have
            logger.warning(f"What was applied before is not part of {RECIPE_FILE}. {error}")
        else:
            return text
    return recipe.yaml() if own else None
