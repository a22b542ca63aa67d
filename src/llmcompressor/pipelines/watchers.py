# SPDX-License-Identifier: Apache-2.0
"""Twin streams: two passes for every batch, through the compressed and the original weights.

They pair the two inputs of a Linear token by token. The original pass of a batch always runs ahead
of the compressed one. Its inputs to each module are kept for the compressed pass of that batch
(``reference_inputs``). Modules that are already compressed run with their original
parameters.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import greenlet
from torch import Tensor
from torch.nn import Embedding, Module, Parameter
from torch.utils.hooks import RemovableHandle

from llmcompressor.core.state import State
from llmcompressor.errors import NonFiniteError
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modeling.call_graph import first_tensor
from llmcompressor.modeling.hooks import HooksMixin, run_input_hooks
from llmcompressor.modeling.names import named_modules
from llmcompressor.modeling.paused_forward import Pass, PausedForward
from llmcompressor.modeling.weights import embeddings
from llmcompressor.numerics.extremes import is_finite
from llmcompressor.observers.tokens import real_tokens


class OriginalWeights:
    """Original parameters of compressed modules, kept as long as original passes need them.

    Args:
        passes: number of original passes.
        calls: known number of calls of each module in one pass, at least.
        is_layer_active: returns True if a waiting pass may call a module more often than that.
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
                self._saved[module] = list(_parameter_copies(module.modules()))

    def keep_for(self, later: Module, modules: Iterable[Module]) -> None:
        """Copy the parameters of ``modules``, which run again inside a later module."""
        if not self._all_served(later):
            self._saved[later] = list(_parameter_copies(modules))

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


def _parameter_copies(modules: Iterable[Module]) -> Iterator[tuple[Module, str, Parameter]]:
    for owner in modules:
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                yield owner, name, Parameter(parameter.detach().clone(), requires_grad=False)


@contextlib.contextmanager
def capture_inputs(modules: Iterable[Module]) -> Iterator[dict[Module, Tensor]]:
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


# --------------------
# Reference inputs: a module's input in the original model, with two activation streams.


def reference_input(module: Module, tensor: Tensor, state: State) -> Tensor | None:
    """The input of ``module`` in the original model, if its tokens are those of ``tensor``.

    It is moved to the device of ``tensor``. In the original model a router may send other tokens to
    an expert, even if they are as many.
    """
    references = state.calibration.reference_inputs
    reference = None if references is None else references.get(module)
    if reference is None or reference.shape != tensor.shape:
        return None
    ids = None if state.batch_data is None else state.batch_data.get("input_ids")
    if tensor.ndim == 2 and isinstance(ids, Tensor) and len(tensor) != ids.numel():
        return None
    return reference.to(tensor.device)


# --------------------
# Checks for NaN and infinity in the outputs of blocks during calibration.
#
# Modules outside of blocks are checked too, the final norm above all. The output head is left out,
# as its logits are not needed.
#
# Statistics check only the inputs of calibrated modules. A fault elsewhere would go unnoticed, or
# be attributed to a module of a later block.


def _leaves_outside_blocks(model: Module) -> dict[Module, str]:
    """Leaf modules with weights outside of all blocks, except embeddings and the output head."""
    blocks = find_blocks(model)
    inside = {module for block in blocks for module in block.modules()}
    _, head = embeddings(model)
    return {
        module: name
        for name, module in named_modules(model)
        if blocks and module not in inside and module is not head
        if module._parameters and not any(module.children()) and not isinstance(module, Embedding)
    }


@contextmanager
def check_finite_outputs(model: Module, state: State) -> Iterator[None]:
    """Check the output of each block while the body runs; padding positions are ignored.

    Raises:
        NonFiniteError: names the first block, or module outside of them, whose output holds NaN or
            infinity.
    """
    handles = [
        module.register_forward_hook(_finite_check_hook(name, state))
        for module, name in [*find_blocks(model).items(), *_leaves_outside_blocks(model).items()]
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _finite_check_hook(name: str, state: State) -> Callable[[Module, Any, Any], None]:
    def look(module: Module, args: Any, output: Any) -> None:
        found = first_tensor(tuple(output) if isinstance(output, tuple | list) else (output,), {})
        if found is None or is_finite(found):
            return
        mask = state.calibration.token_mask
        if (
            mask is None
            or found.ndim < 2
            or not is_finite(real_tokens(found, mask.to(found.device)))
        ):
            raise NonFiniteError(
                f"What {name} returns holds NaN or infinity. Look for a bad weight in it, or load "
                "the model with precision='float32'."
            )

    return look


@contextmanager
def end_passes_after(model: Module, block: Module) -> Iterator[Callable[[], None]]:
    """End passes after a block, at the next checked module (mostly the final norm).

    A pass also ends before another block, before the head, and before a module on the meta device.

    Yields:
        A function to be called as each pass begins.
    """
    is_behind = [False]

    def leave(*_: object) -> None:
        is_behind[0] = True

    def end(module: Module, *_: object) -> None:
        if is_behind[0]:
            raise greenlet.GreenletExit

    def end_without_data(module: Module, *_: object) -> None:
        if any(one.is_meta for one in module._parameters.values() if one is not None):
            end(module)

    _, head = embeddings(model)
    before = [one for one in (*find_blocks(model), head) if one is not None]
    outside = list(_leaves_outside_blocks(model))
    handles = [block.register_forward_hook(leave)]
    handles += [one.register_forward_pre_hook(end) for one in before]
    handles += [one.register_forward_pre_hook(end_without_data) for one in outside]
    handles += [one.register_forward_hook(end) for one in outside]  # after the hook that checks
    try:
        yield lambda: is_behind.__setitem__(0, False)
    finally:
        for handle in handles:
            handle.remove()


# --------------------
# Early hook calls: modifier hooks that are called while a pass waits.
#
# Modifiers compress a module once its hooks have been called for all batches, before it runs. So
# q, k and v, which are compressed together when all passes wait at q, have to see their inputs
# there; and a block, which runs twice, has to show the output of its first run. When the pass then
# goes on and calls these modules, their hooks are disabled, so that no batch counts twice.


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
