# SPDX-License-Identifier: Apache-2.0
"""The techniques, one folder each, and the base class that they share."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from llmcompressor.collecting import quick_imports

if TYPE_CHECKING:
    from llmcompressor.modifiers.factory import ModifierFactory
    from llmcompressor.modifiers.modifier import Modifier

__all__ = ["Modifier", "ModifierFactory"]

_HOME = {"Modifier": "modifier", "ModifierFactory": "factory"}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        with quick_imports():
            return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
