# SPDX-License-Identifier: Apache-2.0
"""Public entry points: ``oneshot``, ``train`` and ``model_free_ptq``.

The names below are imported lazily. Two of them have the same name as their module. Importing such
a module would replace the function as an attribute of the package, so this package refuses modules
under these names. ``from llmcompressor.entrypoints.oneshot import ...`` still finds the module.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from llmcompressor.runtime.registry import lazy_exports

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

__getattr__, __dir__ = lazy_exports(globals(), _HOMES)


class _Page(ModuleType):
    """A package whose functions are not replaced by submodules of the same name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _HOMES or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Page
