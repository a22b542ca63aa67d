# SPDX-License-Identifier: Apache-2.0
"""Adapters of PEFT, which stand beside the weights of a model.

A module with an adapter shows the weight of its base as its own and adds to what that computes.
Where the base is changed, the adapters do not fit what they add to; where they are changed too,
what comes out is neither. Told by the names of PEFT's classes, which need not be installed.
"""

from __future__ import annotations

from torch.nn import Module

from llmcompressor.names import named_modules

__all__ = ["MERGE", "adapters_of"]

MERGE = "Merge them first: model = model.merge_and_unload(); model.unload() takes them off."
"""What to do about adapters."""

_LAYER = "BaseTunerLayer"
_WRAPPERS = frozenset({"PeftModel", "PeftMixedModel"})


def adapters_of(model: Module) -> list[str]:
    """Where a model has adapters: the modules' names; the class of PEFT's wrapper if it has none.

    >>> adapters_of(Module())
    []
    """
    names = [name for name, module in named_modules(model) if _LAYER in _classes(module)]
    return names or ([type(model).__name__] if _WRAPPERS & _classes(model) else [])


def _classes(module: Module) -> set[str]:
    return {one.__name__ for one in type(module).__mro__}
