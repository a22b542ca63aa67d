# SPDX-License-Identifier: Apache-2.0
"""Reference inputs: a module's input in the original model, with two activation streams."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Module

from llmcompressor.core.state import State

__all__ = ["aligned_reference"]


def aligned_reference(module: Module, tensor: Tensor, state: State) -> Tensor | None:
    """The input of ``module`` in the original model, if its tokens are those of ``tensor``.

    It is moved to the device of ``tensor``. In the original model a router may send other tokens to
    an expert, even if they are as many.
    """
    references = state.reference_inputs
    reference = None if references is None else references.get(module)
    if reference is None or reference.shape != tensor.shape:
        return None
    ids = None if state.batch_data is None else state.batch_data.get("input_ids")
    if tensor.ndim == 2 and isinstance(ids, Tensor) and len(tensor) != ids.numel():
        return None
    return reference.to(tensor.device)
