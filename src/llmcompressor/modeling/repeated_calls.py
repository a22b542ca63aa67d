# SPDX-License-Identifier: Apache-2.0
"""Copied arguments for runs of a module outside of the model's own forward.

A forward may write to its arguments: keys and values to a cache, or to a dict that later blocks
read. A module that is run twice on the same arguments would find its own writes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from enum import Enum
from typing import Any

from torch import Tensor
from torch.nn import Module

__all__ = ["for_another_run"]


def for_another_run(value: Any, of_tensor: Callable[[Tensor], Tensor] = lambda one: one) -> Any:
    """Copy arguments, so that a forward can write to them without side effects.

    Containers and stateful objects are copied. Tensors are shared, except those that such an object
    holds, which it may change in place.

    Args:
        value: what a module is called with.
        of_tensor: what to put in place of each tensor, at any depth.
    """
    return _Twins(of_tensor).of(value)


class _Twins:
    """Copies of values, one for each object.

    Args:
        of_tensor: what to put in place of each tensor.
    """

    def __init__(self, of_tensor: Callable[[Tensor], Tensor]) -> None:
        self._of_tensor = of_tensor
        self._made: dict[int, Any] = {}

    def of(self, value: Any, *, is_held: bool = False) -> Any:
        """The copy of a value; ``is_held`` if a stateful object holds it."""
        if isinstance(value, Tensor):
            return self._of_tensor(value.clone() if is_held else value)
        if id(value) in self._made:
            return self._made[id(value)]
        if type(value) in (tuple, list, set):
            twin = type(value)(self.of(item, is_held=is_held) for item in value)
            self._made[id(value)] = twin
            return twin
        is_mapping = isinstance(value, MutableMapping)
        if not is_mapping and not _holds_state(value):
            return value
        try:
            twin = copy.copy(value)
        except TypeError:  # what cannot be copied: a lock, a handle
            return value
        self._made[id(value)] = twin
        if is_mapping:
            for key, item in value.items():
                twin[key] = self.of(item, is_held=is_held)
        else:
            for name, item in vars(value).items():
                vars(twin)[name] = self.of(item, is_held=True)
        return twin


def _holds_state(value: Any) -> bool:
    """Return True if a value is an object with attributes that a forward may set: a cache, say."""
    named = hasattr(value, "__dict__")
    return named and not isinstance(value, Module | type | Enum) and not callable(value)
