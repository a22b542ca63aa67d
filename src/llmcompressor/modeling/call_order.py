# SPDX-License-Identifier: Apache-2.0
"""Call order of modules in a forward, and the modules that share an input tensor.

q, k and v share one input, and so do gate and up: their input statistics are the same, and they can
be solved together. Sharing is not guessed from names but observed in one small forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

__all__ = ["CallOrder", "first_tensor", "version_of", "watch_calls"]


@dataclass(frozen=True)
class CallOrder:
    """Modules in call order, grouped by shared input, as :func:`watch_calls` records them."""

    groups: tuple[tuple[Module, ...], ...]
    """Modules with one and the same input, in the order of the first call of each group."""
    calls: Mapping[Module, int]
    """How often each module was called."""

    @property
    def order(self) -> tuple[Module, ...]:
        """All modules that were called, by the first call of their group."""
        return tuple(module for group in self.groups for module in group)

    def split(self, key: Callable[[Module], object]) -> CallOrder:
        """The same calls, with each group split by ``key``."""
        groups: list[tuple[Module, ...]] = []
        for group in self.groups:
            parts: dict[object, list[Module]] = {}
            for module in group:
                parts.setdefault(key(module), []).append(module)
            groups += [tuple(part) for part in parts.values()]
        return CallOrder(tuple(groups), self.calls)

    def group_of(self, module: Module) -> tuple[Module, ...]:
        """The modules that share ``module``'s input, itself included."""
        return self._group_by_module.get(module, (module,))

    @cached_property
    def _group_by_module(self) -> Mapping[Module, tuple[Module, ...]]:
        return {module: group for group in reversed(self.groups) for module in group}


def first_tensor(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The input of a Linear-like call: its first tensor argument."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value
    return None


def watch_calls(
    run: Callable[[], object],
    modules: Mapping[Module, str],
    region: Callable[[str], object] = lambda name: name.rpartition(".")[0],
    also_count: Iterable[Module] = (),
) -> CallOrder:
    """Run a forward and record which of ``modules`` share an input.

    Args:
        run: runs the model once, on something small.
        modules: module → name.
        region: modules are grouped only within one region (by default: one parent).
        also_count: further modules whose calls are counted; they are grouped with none.
    """
    groups: list[list[Module]] = []
    seen: list[tuple[weakref.ref[Tensor], int, object, list[Module]]] = []
    calls: dict[Module, int] = {}

    def record(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[module] = calls.get(module, 0) + 1
        tensor = first_tensor(args, kwargs)
        if calls[module] > 1:
            _alone(groups, module)
            return
        place = region(modules[module])
        if tensor is not None:
            for reference, version, other_place, group in reversed(seen):
                same = reference() is tensor and version == version_of(tensor)
                if same and other_place == place:
                    group.append(module)
                    return
        groups.append([module])
        if tensor is not None:
            seen.append((weakref.ref(tensor), version_of(tensor), place, groups[-1]))
            del seen[:-64]  # calls this far apart share no input in practice

    def count(module: Module, args: tuple[Any, ...]) -> None:
        calls[module] = calls.get(module, 0) + 1

    handles = [module.register_forward_pre_hook(count) for module in set(also_count) - set(modules)]
    handles += [module.register_forward_pre_hook(record, with_kwargs=True) for module in modules]
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return CallOrder(tuple(tuple(group) for group in groups if group), calls)


def version_of(tensor: Tensor) -> int:
    """Number of in-place writes to a tensor; 0 where torch does not count (inference mode)."""
    return 0 if tensor.is_inference() else tensor._version


def _alone(groups: list[list[Module]], module: Module) -> None:
    """Move a module that is called again to a group of its own, as it has several inputs."""
    for position, group in enumerate(groups):
        if module in group and len(group) > 1:
            first = group[0] is module
            group.remove(module)
            groups.insert(position if first else position + 1, [module])
            return
