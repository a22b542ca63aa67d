# SPDX-License-Identifier: Apache-2.0
"""Compression techniques (modifiers), one package each, and their base class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmcompressor.registry import lazy_page

if TYPE_CHECKING:
    from llmcompressor.modifiers.factory import ModifierFactory
    from llmcompressor.modifiers.modifier import Modifier
    from llmcompressor.modifiers.modifier import Modifier as ModifierInterface

__all__ = ["Modifier", "ModifierFactory", "ModifierInterface"]

_HOMES = {
    "Modifier": ".modifier",
    "ModifierFactory": ".factory",
    "ModifierInterface": "llmcompressor.modifiers.modifier:Modifier",
}

__getattr__, __dir__ = lazy_page(globals(), _HOMES)
