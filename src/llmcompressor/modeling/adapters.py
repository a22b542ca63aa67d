# SPDX-License-Identifier: Apache-2.0
"""PEFT adapters: detection of models whose weights have adapters attached.

A module with an adapter exposes the weight of its base as its own, and adds the adapter's product
to the output. An adapter no longer fits once its base is compressed. Adapters are detected by the
names of PEFT's classes, so PEFT need not be installed.
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
    """Names of the modules with adapters; if there are none, the name of PEFT's wrapper class.

    >>> adapters_of(Module())
    []
    """
    names = [name for name, module in named_modules(model) if _LAYER in _classes(module)]
    return names or ([type(model).__name__] if _WRAPPERS & _classes(model) else [])


def _classes(module: Module) -> set[str]:
    return {one.__name__ for one in type(module).__mro__}
