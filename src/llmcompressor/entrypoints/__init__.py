# SPDX-License-Identifier: Apache-2.0
"""What users call: parse, wire, run, save.

The names below are imported when they are first asked for. Two of them are called like the modules
that they live in. Importing such a module makes it an attribute of its package, in place of the
function; so this package takes no module by these names. ``from llmcompressor.entrypoints.oneshot
import ...`` finds the module all the same.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from llmcompressor.registry import lazy_page

if TYPE_CHECKING:
    from llmcompressor.entrypoints.model_free import model_free_ptq
    from llmcompressor.entrypoints.oneshot import Oneshot, oneshot
    from llmcompressor.entrypoints.train import train

__all__ = ["Oneshot", "model_free_ptq", "oneshot", "train"]

_HOMES = {
    "Oneshot": ".oneshot",
    "model_free_ptq": ".model_free",
    "oneshot": ".oneshot",
    "train": ".train",
}

__getattr__, __dir__ = lazy_page(globals(), _HOMES)


class _Page(ModuleType):
    """A package whose names mean the same whatever else is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _HOMES or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Page
