# SPDX-License-Identifier: Apache-2.0
"""Lazy parameters: a block is loaded when one of its parameters is first accessed.

After a run over a checkpoint the blocks are on disk and not in memory. The returned model is
complete all the same: a module's parameters are kept in a dict that loads their block on first
access, by a forward pass, by ``parameters()``, by ``state_dict()`` or by name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, ItemsView, ValuesView
from typing import Any

from torch.nn import Module

__all__ = ["is_unread", "load_on_demand"]


def load_on_demand(block: Module, load: Callable[[], None]) -> None:
    """Call ``load`` before the first access to a parameter of ``block``.

    Args:
        block: its parameters are on the meta device.
        load: load the block's parameters.
    """
    modules = list(block.modules())

    def read() -> None:
        for module in modules:
            if isinstance(module._parameters, _Unread):
                module._parameters = dict(dict.items(module._parameters))
        load()

    for module in modules:
        if dict(module._parameters):
            module._parameters = _Unread(module, read)


def is_unread(module: Module) -> bool:
    """Return True if a module's parameters have not been loaded yet."""
    return isinstance(module._parameters, _Unread)


class _Unread(dict[str, Any]):
    """The lazy parameters of one module; any access to a value loads them.

    A caller that holds this dict when that happens (the module itself, in the middle of a lookup)
    reads the module's new parameters from then on.
    """

    def __init__(self, module: Module, read: Callable[[], None]) -> None:
        super().__init__(module._parameters)
        self._module = module
        self._read = read

    def _loaded(self) -> dict[str, Any]:
        if self._module._parameters is self:
            self._read()
        return self._module._parameters

    def __getitem__(self, name: str) -> Any:
        return self._loaded()[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._loaded()[name] = value

    def __delitem__(self, name: str) -> None:
        del self._loaded()[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self._loaded().get(name, default)

    def pop(self, *arguments: Any) -> Any:
        return self._loaded().pop(*arguments)

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        return self._loaded().items()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        return self._loaded().values()

    def copy(self) -> dict[str, Any]:
        return self._loaded().copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(self._loaded(), memo)

    def __reduce__(self) -> Any:
        return dict, (self._loaded(),)
