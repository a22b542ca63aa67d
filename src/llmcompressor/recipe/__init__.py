# SPDX-License-Identifier: Apache-2.0
"""Recipes: reading, checking, combining and writing them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmcompressor.registry import lazy_page

if TYPE_CHECKING:
    from llmcompressor.recipe.recipe import Recipe
    from llmcompressor.recipe.stages import Stage

__all__ = ["Recipe", "Stage"]

# On demand, so that the expressions can be used without loading the modifiers.
__getattr__, __dir__ = lazy_page(globals(), {"Recipe": ".recipe", "Stage": ".stages"})
