# SPDX-License-Identifier: Apache-2.0
"""Compression techniques (modifiers), one package each, and their base class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmcompressor.runtime.registry import lazy_exports

if TYPE_CHECKING:
    from llmcompressor.core.modifier import Modifier
    from llmcompressor.core.modifier import Modifier as ModifierInterface
    from llmcompressor.core.modifier_registry import ModifierFactory
    from llmcompressor.recipe.stages import StageModifiers

__all__ = ["Modifier", "ModifierFactory", "ModifierInterface", "StageModifiers"]

_HOMES = {
    "Modifier": "llmcompressor.core.modifier:Modifier",
    "ModifierFactory": "llmcompressor.core.modifier_registry:ModifierFactory",
    "ModifierInterface": "llmcompressor.core.modifier:Modifier",
    "StageModifiers": "llmcompressor.recipe.stages:StageModifiers",
}

__getattr__, __dir__ = lazy_exports(globals(), _HOMES)
