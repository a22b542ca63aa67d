# SPDX-License-Identifier: Apache-2.0
"""AWQ's published loss: the mean squared error of the output of the Linears' parent module.

For every candidate the parent (an attention, an MLP; the Linear itself if it is alone) is rerun on
all batches, with the weights of its Linears scaled, rounded and unscaled.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
from llmcompressor.modeling.repeated_calls import for_another_run
from llmcompressor.modeling.scaling import swapped
from llmcompressor.modeling.spilled import Shelf, room_on
from llmcompressor.numerics.awq import ErrorOf, Round
from llmcompressor.observers.tokens import real_tokens

__all__ = ["ParentRuns", "parent_of"]

_EVERYTHING = sys.maxsize
"""Bytes that no data exceeds."""


@dataclass(frozen=True)
class _Call:
    """Recorded arguments of a parent's forward.

    Attributes:
        args: positional arguments without its input: masks and position embeddings, which the
            paused forward holds too.
        kwargs: keyword arguments without its input.
        ticket: shelf ticket of the input, which replaces each :data:`_INPUT`; ``None`` if no
            argument is a tensor.
        mask: bool ``[batch, tokens]`` of the real tokens; ``None``: all are.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    ticket: int | None
    mask: Tensor | None

    def with_input(self, tensor: Tensor | None) -> tuple[list[Any], dict[str, Any]]:
        """The arguments to call the parent with."""
        own_args, own_kwargs = for_another_run((self.args, dict(self.kwargs)))
        args = [tensor if value is _INPUT else value for value in own_args]
        return args, {
            key: tensor if value is _INPUT else value for key, value in own_kwargs.items()
        }


_INPUT = object()


class ParentRuns:
    """Recorded calls of the sets' parents, and the output errors of candidates on them.

    Inputs and outputs stay on an accelerator while they fit half of its free memory, or of what a
    limit leaves; the others are offloaded to main memory.

    Args:
        state: has the mask of real tokens and the memory limit.
        names: module → name.
        device: device for all of it; ``None``: wherever there is room.

    Attributes:
        tokens: number of real tokens of the parent in the last :meth:`error_of`.
    """

    def __init__(self, state: State, names: Mapping[Module, str], device: str | None) -> None:
        self._state = state
        self._modules = {name: module for module, name in names.items()}
        self._device = device
        self._calls: dict[Module, list[_Call]] = {}
        self._sets: dict[Module, set[str]] = {}
        self._shelf = Shelf(_EVERYTHING)
        self.tokens = 0

    def watch(self, one: SmoothSet) -> Module | None:
        """The parent of a set, to register :attr:`hook` on; ``None`` if it has the hook already."""
        parent = self._parent(one)
        self._sets.setdefault(parent, set()).add(one.name)
        if parent in self._calls:
            return None
        self._calls[parent] = []
        return parent

    def hook(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record a call of a parent."""
        args, kwargs = for_another_run((args, kwargs))
        given, mask = first_tensor(args, kwargs), self._state.token_mask
        if given is None:
            self._calls[module].append(_Call(args, kwargs, None, mask))
            return
        if self._shelf.is_empty:  # measure the free memory while nothing of a block is kept
            room = room_on(given.device, self._state.device_memory)
            self._shelf = Shelf(_EVERYTHING, room if self._device is None else _EVERYTHING)
        call = _Call(
            tuple(_INPUT if value is given else value for value in args),
            {key: _INPUT if value is given else value for key, value in kwargs.items()},
            self._put(given),
            mask,
        )
        self._calls[module].append(call)

    def drop(self, one: SmoothSet) -> None:
        """Free the calls of a set's parent, unless another set needs them."""
        parent = self._parent(one)
        self._sets[parent].discard(one.name)
        if not self._sets[parent]:
            for call in self._calls[parent]:
                if call.ticket is not None:
                    self._shelf.drop(call.ticket)
            self._calls[parent] = []

    @contextlib.contextmanager
    def error_of(self, one: SmoothSet, rounds: Mapping[Module, Round]) -> Iterator[ErrorOf]:
        """Yield a function from scales ``[K, C]`` to squared errors of the parent's output.

        The parent's original outputs over real tokens are kept while the body runs.

        Args:
            one: the set.
            rounds: the rounding of each of its Linears that is quantized.
        """
        parent = self._parent(one)
        self.tokens, plain = 0, list[int]()
        for output_TC in self._outputs(parent):
            self.tokens += len(output_TC)
            plain.append(self._put(output_TC))

        def error_of(scale_C: Tensor) -> float:
            changes = {}
            for module, round_ in rounds.items():
                weight: Any = module.weight
                scaled_RC = (weight.detach().float() * scale_C).to(weight.dtype)
                back_RC = round_(scaled_RC).float() / scale_C
                changes[module] = {"weight": back_RC.to(weight.dtype)}
            with swapped(changes):
                pairs = zip(plain, self._outputs(parent), strict=True)
                return sum(self._squared_change(old, new_TC) for old, new_TC in pairs)

        try:
            yield lambda scale_KC: [error_of(scale_C) for scale_C in scale_KC]
        finally:
            for ticket in plain:
                self._shelf.drop(ticket)

    def _squared_change(self, old: int, new_TC: Tensor) -> float:
        return float((new_TC - self._shelf.see(old, new_TC.device)).float().square().sum())

    def _outputs(self, parent: Module) -> Iterator[Tensor]:
        """Yield the parent's output for each recorded call, ``[tokens, C]``."""
        device = next(parent.parameters()).device
        for call in self._calls[parent]:
            kept = call.ticket
            args, kwargs = call.with_input(None if kept is None else self._shelf.see(kept, device))
            with torch.no_grad(), HooksMixin.disable_hooks():
                output = parent(*args, **kwargs)
            values = output if isinstance(output, tuple | list) else (output,)
            tensor = first_tensor(tuple(values), {})
            assert tensor is not None
            yield real_tokens(tensor, call.mask)

    def _put(self, tensor: Tensor) -> int:
        kept = tensor.detach()
        return self._shelf.put(kept if self._device is None else kept.to(self._device))

    def _parent(self, one: SmoothSet) -> Module:
        return parent_of(one, self._modules)


def parent_of(one: SmoothSet, modules: Mapping[str, Module]) -> Module:
    """The innermost callable module that contains all balance layers of a set.

    Args:
        one: the set.
        modules: modules of the model, by name.
    """
    name = reduce(common_parent, one.balance)
    while isinstance(modules[name], ModuleList | ModuleDict):
        name = name.rpartition(".")[0]
    return modules[name]
