# SPDX-License-Identifier: Apache-2.0
"""Early hook calls: modifier hooks that are called while a pass waits.

Modifiers compress a module once its hooks have been called for all batches, before it runs. So q,
k and v, which are compressed together when all passes wait at q, have to see their inputs there;
and a block, which runs twice, has to show the output of its first run. When the pass then goes on
and calls these modules, their hooks are disabled, so that no batch counts twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from llmcompressor.modeling.hooks import HooksMixin, run_input_hooks
from llmcompressor.modeling.paused_forward import Pass, PausedForward

__all__ = ["EarlyHooks"]


class EarlyHooks:
    """Calls hooks of modifiers early, once per pass.

    Args:
        forward: knows which pass is running.
    """

    def __init__(self, forward: PausedForward) -> None:
        self._forward = forward
        self._trial: Pass | None = None
        self._inputs: set[tuple[Pass, Module]] = set()
        self._outputs: set[tuple[Pass, Module]] = set()
        self._silences: list[AbstractContextManager[None]] = []
        self._handles: list[RemovableHandle] = []

    def watch(self, modules: Iterable[Module]) -> None:
        """Prepare to disable the hooks of ``modules``, after modifiers have registered theirs."""
        for module in modules:
            self._handles += [
                module.register_forward_pre_hook(self._begin_input, prepend=True),
                module.register_forward_pre_hook(self._end),
                module.register_forward_hook(self._begin_output, prepend=True),
                module.register_forward_hook(self._end),
            ]

    def close(self) -> None:
        """Remove all hooks and re-enable what is disabled."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        while self._silences:
            self._silences.pop().__exit__(None, None, None)

    def show_input(self, one: Pass, modules: Iterable[Module]) -> None:
        """Call the input hooks of ``modules`` with the input at which ``one`` waits."""
        for module in modules:
            args, kwargs = run_input_hooks(module, one.args, one.kwargs)
            changed = args is not one.args or kwargs != one.kwargs
            if not changed:  # a hook that changes inputs is needed when the module is called
                self._inputs.add((one, module))

    def run(self, one: Pass) -> None:
        """Run the module at which ``one`` waits, with its hooks, to calibrate it."""
        assert one.module is not None
        self._inputs.add((one, one.module))  # they have seen it when the pass arrived
        self._trial = one
        try:
            self._forward.execute(one, with_hooks=True)
        finally:
            self._trial = None
        self._outputs.add((one, one.module))

    def _begin_input(self, module: Module, args: tuple[Any, ...]) -> None:
        self._begin(self._inputs, module)

    def _begin_output(self, module: Module, args: tuple[Any, ...], output: Any) -> None:
        self._begin(self._outputs, module)

    def _begin(self, done: set[tuple[Pass, Module]], module: Module) -> None:
        one = self._trial or self._forward.current
        if one is not None and (one, module) in done:
            done.discard((one, module))
            silence = HooksMixin.disable_hooks()
            silence.__enter__()
            self._silences.append(silence)

    def _end(self, *_: Any) -> None:
        while self._silences:
            self._silences.pop().__exit__(None, None, None)
