# SPDX-License-Identifier: Apache-2.0
"""Twin streams: for every batch one pass through the compressed weights and one through the
original ones, so that each Linear's two inputs meet token by token.

The original pass of a batch always runs ahead of the compressed one. Where it waits, what goes
into each module is kept for the compressed pass of that batch (``state.reference_inputs``); where
a module is already compressed, it runs with the parameters that it had before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from llmcompressor.modeling.call_order import first_tensor
from llmcompressor.modeling.paused_forward import Pass

__all__ = ["OriginalWeights", "input_capture"]


class OriginalWeights:
    """The parameters that compressed modules had, for as long as original passes need them.

    Args:
        passes: how many original passes there are.
        calls: how often one pass calls each module.
    """

    def __init__(self, passes: int, calls: Mapping[Module, int]) -> None:
        self._passes = passes
        self._calls = calls
        self._saved: dict[Module, list[tuple[torch.nn.Parameter, Tensor]]] = {}
        self._served: dict[Module, int] = {}

    def keep(self, modules: Iterable[Module]) -> None:
        """Copy the parameters of ``modules``: they are about to be compressed."""
        for module in modules:
            parameters = module.parameters(recurse=True)
            self._saved[module] = [(p, p.data.clone()) for p in parameters]

    @contextlib.contextmanager
    def in_place(self, module: Module) -> Iterator[None]:
        """``module`` with the parameters it had; counted as one pass served."""
        saved = self._saved.get(module, [])
        present = [parameter.data for parameter, _ in saved]
        try:
            for parameter, data in saved:
                parameter.data = data
            yield
        finally:
            for (parameter, _), data in zip(saved, present, strict=True):
                parameter.data = data
            self._count(module)

    def answer(
        self, one: Pass, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call of a compressed module by an original pass; ``None`` for a compressed pass."""
        if one.stream != "original" or module not in self._saved:
            return None
        forward: Callable[..., Any] = getattr(module.forward, "__wrapped__", module.forward)
        with self.in_place(module):
            return forward(*args, **kwargs)

    def _count(self, module: Module) -> None:
        self._served[module] = self._served.get(module, 0) + 1
        if self._served[module] >= self._passes * self._calls.get(module, 1):
            self._saved.pop(module, None)


@contextlib.contextmanager
def input_capture(modules: Iterable[Module]) -> Iterator[dict[Module, Tensor]]:
    """What goes into each of ``modules`` while the body runs."""
    captured: dict[Module, Tensor] = {}

    def record(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensor = first_tensor(args, kwargs)
        if tensor is not None:
            captured[module] = tensor

    handles = [module.register_forward_pre_hook(record, with_kwargs=True) for module in modules]
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()
