# SPDX-License-Identifier: Apache-2.0
"""Checks for NaN and infinity in the outputs of blocks during calibration.

Modules outside of blocks are checked too, the final norm above all. The output head is left out, as
its logits are not needed.

Statistics check only the inputs of calibrated modules. A fault elsewhere would go unnoticed, or
be attributed to a module of a later block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import greenlet
from torch import Tensor
from torch.nn import Embedding, Module

from llmcompressor.core.state import State
from llmcompressor.errors import NonFiniteError
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modeling.call_order import first_tensor
from llmcompressor.modeling.embeddings import embeddings
from llmcompressor.names import named_modules
from llmcompressor.numerics.finite import is_finite
from llmcompressor.observers.tokens import real_tokens

__all__ = ["blocks_watched", "ends_behind"]


def _outside_blocks(model: Module) -> dict[Module, str]:
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
def blocks_watched(model: Module, state: State) -> Iterator[None]:
    """Check the output of each block while the body runs; padding positions are ignored.

    Raises:
        NonFiniteError: names the first block, or module outside of them, whose output holds NaN or
            infinity.
    """
    handles = [
        module.register_forward_hook(_looking(name, state))
        for module, name in [*find_blocks(model).items(), *_outside_blocks(model).items()]
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _looking(name: str, state: State) -> Callable[[Module, Any, Any], None]:
    def look(module: Module, args: Any, output: Any) -> None:
        found = first_tensor(tuple(output) if isinstance(output, tuple | list) else (output,), {})
        if found is None or is_finite(found):
            return
        mask = state.token_mask
        if mask is None or found.ndim < 2 or not _is_finite_where_real(found, mask):
            raise NonFiniteError(
                f"What {name} returns holds NaN or infinity. Look for a bad weight in it, or load "
                "the model with precision='float32'."
            )

    return look


def _is_finite_where_real(found: Tensor, mask: Tensor) -> bool:
    return is_finite(real_tokens(found, mask.to(found.device)))


@contextmanager
def ends_behind(model: Module, block: Module) -> Iterator[Callable[[], None]]:
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
    outside = list(_outside_blocks(model))
    handles = [block.register_forward_hook(leave)]
    handles += [one.register_forward_pre_hook(end) for one in before]
    handles += [one.register_forward_pre_hook(end_without_data) for one in outside]
    handles += [one.register_forward_hook(end) for one in outside]  # after the hook that checks
    try:
        yield lambda: is_behind.__setitem__(0, False)
    finally:
        for handle in handles:
            handle.remove()
