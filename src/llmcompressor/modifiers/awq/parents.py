# SPDX-License-Identifier: Apache-2.0
"""The published loss of AWQ: the mean squared error of what the Linears' parent returns.

For every candidate the parent (an attention, an MLP; the Linear itself where it is alone) runs
on all batches, with the weights of its Linears scaled, rounded and scaled back.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleDict, ModuleList

from llmcompressor.core.state import State
from llmcompressor.modeling.call_order import first_tensor
from llmcompressor.modeling.hooks import HooksMixin
from llmcompressor.modeling.mapped_places import SmoothSet
from llmcompressor.modeling.matching import common_parent
from llmcompressor.modeling.scaling import swapped
from llmcompressor.numerics.awq import ErrorOf, Round
from llmcompressor.observers.tokens import real_tokens

__all__ = ["ParentRuns", "parent_of"]

_Call = tuple[tuple[Any, ...], dict[str, Any], Tensor | None]


class ParentRuns:
    """What the parents of sets were called with, and how candidates change what they return.

    Args:
        state: tells which tokens are real.
        names: module → name.
        device: where the calls are kept; where they were made if ``None``.
    """

    def __init__(self, state: State, names: Mapping[Module, str], device: str | None) -> None:
        self._state = state
        self._modules = {name: module for module, name in names.items()}
        self._device = device
        self._calls: dict[Module, list[_Call]] = {}
        self._sets: dict[Module, set[str]] = {}

    def watch(self, one: SmoothSet) -> Module | None:
        """The parent of a set, for :attr:`hook` to be put on; ``None`` if it is watched already."""
        parent = self._parent(one)
        self._sets.setdefault(parent, set()).add(one.name)
        if parent in self._calls:
            return None
        self._calls[parent] = []
        return parent

    def hook(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep what a parent is called with."""
        kept = self._moved((args, kwargs), self._device)
        self._calls[module].append((*kept, self._state.token_mask))

    def drop(self, one: SmoothSet) -> None:
        """Forget the calls of a set's parent, unless another set needs them."""
        parent = self._parent(one)
        self._sets[parent].discard(one.name)
        if not self._sets[parent]:
            self._calls[parent] = []

    def error_of(self, one: SmoothSet, rounds: Mapping[Module, Round]) -> ErrorOf:
        """From scales ``[K, C]`` to squared errors of the parent's output over real tokens.

        Args:
            one: the set.
            rounds: how the weights of those of its Linears are rounded that are quantized.
        """
        parent = self._parent(one)
        plain = self._outputs(parent)

        def error_of(scale_C: Tensor) -> float:
            changes = {}
            for module, round_ in rounds.items():
                weight: Any = module.weight
                scaled_RC = (weight.detach().float() * scale_C).to(weight.dtype)
                back_RC = round_(scaled_RC).float() / scale_C
                changes[module] = {"weight": back_RC.to(weight.dtype)}
            with swapped(changes):
                moved = self._outputs(parent)
            pairs = zip(plain, moved, strict=True)
            return sum(float((new - old).float().square().sum()) for old, new in pairs)

        return lambda scale_KC: [error_of(scale_C) for scale_C in scale_KC]

    @torch.no_grad()
    def _outputs(self, parent: Module) -> list[Tensor]:
        device = next(parent.parameters()).device
        found = []
        with HooksMixin.disable_hooks():
            for args, kwargs, mask in self._calls[parent]:
                args_here, kwargs_here = self._moved((args, kwargs), device)
                output = parent(*args_here, **kwargs_here)
                values = output if isinstance(output, tuple | list) else (output,)
                tensor = first_tensor(tuple(values), {})
                assert tensor is not None
                found.append(real_tokens(tensor, mask))
        return found

    def _parent(self, one: SmoothSet) -> Module:
        return parent_of(one, self._modules)

    def _moved(self, value: Any, device: Any) -> Any:
        if isinstance(value, Tensor):
            return value if device is None else value.to(device)
        if isinstance(value, Mapping) and type(value) is dict:
            return {key: self._moved(item, device) for key, item in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self._moved(item, device) for item in value)
        return value


def parent_of(one: SmoothSet, modules: Mapping[str, Module]) -> Module:
    """The lowest module that holds all readers of a set and is called itself.

    Args:
        one: the set.
        modules: of the model, by name.
    """
    name = reduce(common_parent, one.balance)
    while isinstance(modules[name], ModuleList | ModuleDict):
        name = name.rpartition(".")[0]
    return modules[name]
