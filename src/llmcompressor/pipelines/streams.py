# SPDX-License-Identifier: Apache-2.0
"""Twin streams: two passes for every batch, through the compressed and the original weights.

They pair the two inputs of a Linear token by token. The original pass of a batch always runs ahead
of the compressed one. Its inputs to each module are kept for the compressed pass of that batch
(``state.reference_inputs``). Modules that are already compressed run with their original
parameters.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter

from llmcompressor.modeling.call_order import first_tensor
from llmcompressor.modeling.paused_forward import Pass

__all__ = ["OriginalWeights", "input_capture"]


class OriginalWeights:
    """Original parameters of compressed modules, kept as long as original passes need them.

    Args:
        passes: number of original passes.
        calls: known number of calls of each module in one pass, at least.
        may_be_called: returns True if a waiting pass may call a module more often than that.
    """

    def __init__(
        self,
        passes: int,
        calls: Mapping[Module, int],
        may_be_called: Callable[[Module], bool] = lambda _: False,
    ) -> None:
        self._passes = passes
        self._calls = calls
        self._may_be_called = may_be_called
        self._saved: dict[Module, list[tuple[Module, str, Parameter]]] = {}
        self._served: dict[Module, Counter[int]] = {}

    def keep(self, modules: Iterable[Module]) -> None:
        """Copy the parameters of ``modules``, which are about to be compressed.

        All passes wait now, so copies that no original pass needs any more are dropped.
        """
        for module in [module for module in self._saved if self._all_served(module)]:
            del self._saved[module]
        for module in modules:
            if not self._all_served(module):
                self._saved[module] = list(_copies(module.modules()))

    def keep_for(self, later: Module, modules: Iterable[Module]) -> None:
        """Copy the parameters of ``modules``, which run again inside a later module."""
        if not self._all_served(later):
            self._saved[later] = list(_copies(modules))

    @contextlib.contextmanager
    def in_place(self, one: Pass, module: Module) -> Iterator[None]:
        """Put the original parameters of ``module`` in place while an original pass runs it."""
        if one.stream != "original":
            yield
            return
        saved = self._saved.get(module, [])
        present = [(owner, name, owner._parameters.get(name)) for owner, name, _ in saved]
        try:
            for owner, name, parameter in saved:
                owner._parameters[name] = parameter
            yield
        finally:
            for owner, name, present_parameter in present:
                owner._parameters[name] = present_parameter
            self._served.setdefault(module, Counter())[one.index] += 1

    def _all_served(self, module: Module) -> bool:
        """Return True if no original pass will call ``module`` again."""
        served, calls = self._served.get(module, Counter()), self._calls.get(module, 1)
        if self._may_be_called(module):
            return False
        return len(served) == self._passes and min(served.values()) >= calls


def _copies(modules: Iterable[Module]) -> Iterator[tuple[Module, str, Parameter]]:
    for owner in modules:
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                yield owner, name, Parameter(parameter.detach().clone(), requires_grad=False)


@contextlib.contextmanager
def input_capture(modules: Iterable[Module]) -> Iterator[dict[Module, Tensor]]:
    """Record the first input of each of ``modules`` while the body runs."""
    captured: dict[Module, Tensor] = {}

    def record(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensor = first_tensor(args, kwargs)
        if tensor is not None:
            captured.setdefault(module, tensor)  # of a module that is called again, the first

    handles = [module.register_forward_pre_hook(record, with_kwargs=True) for module in modules]
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()
