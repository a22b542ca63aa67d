# SPDX-License-Identifier: Apache-2.0
"""Sees that what blocks return holds neither NaN nor infinity, whatever of them is calibrated.

Statistics see what goes into the modules of the recipe. What goes wrong elsewhere would be passed
on in silence, or be found by a module of a later block, which is then named for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import Module

from llmcompressor.core.state import State
from llmcompressor.errors import NonFiniteError
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modeling.call_order import first_tensor
from llmcompressor.numerics.finite import is_finite
from llmcompressor.observers.tokens import real_tokens

__all__ = ["blocks_watched"]


@contextmanager
def blocks_watched(model: Module, state: State) -> Iterator[None]:
    """Look at what each block returns while the body runs; padding may be anything.

    Raises:
        NonFiniteError: names the first block whose output holds NaN or infinity.
    """
    handles = [
        block.register_forward_hook(_looking(name, state))
        for block, name in find_blocks(model).items()
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
